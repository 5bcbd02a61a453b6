"""What a trainer leaves on disk, and goes on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from trainers import (
    LORA,
    TOKENIZER,
    TRAINERS,
    logits,
    make_group,
    make_narrow,
    make_policy,
    make_step,
    make_trainer,
    same,
    snapshot,
)

from tandem.errors import CheckpointError
from tandem.model.policy import CausalPolicy
from tandem.model.presets import make_model
from tandem.optim import master_weights as masters
from tandem.optim.schedule import lr_share
from tandem.spec.model import LoraSpec
from tandem.spec.optim import CosineSchedule
from tandem.train.trainer import PolicyTrainer
from tandem.types import MEASURED, Metrics

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("make", TRAINERS.values(), ids=TRAINERS)
def test_three_steps_and_three_after_a_load_are_six_to_the_bit(
    make: Callable[..., PolicyTrainer], tmp_path: Path
) -> None:
    def lr(step: int) -> float:
        return 1e-2 * lr_share(CosineSchedule(warmup_steps=2), step, 6)

    def run(trainer: PolicyTrainer, seeds: Sequence[int]) -> list[Metrics]:
        micro_tokens = 10**6 if make is TRAINERS["split, released"] else 32
        steps = [trainer.step(make_step(make_group(seed), micro_tokens=micro_tokens)) for seed in seeds]
        return [{key: value for key, value in step.items() if not key.startswith(MEASURED)} for step in steps]

    straight = make(lr=lr, version=5)
    expected = run(straight, range(6))
    first = make(lr=lr, version=5)
    found = run(first, range(3))
    first.save(tmp_path / "step-8")
    second = make(lr=lr)
    run(second, [99])  # whatever it was, it comes from the checkpoint
    second.load(tmp_path / "step-8")
    assert second.version == 8
    found += run(second, range(3, 6))
    assert found == expected
    assert second.version == straight.version == 11
    assert same(saved(second, tmp_path / "second"), saved(straight, tmp_path / "straight"))


def saved(trainer: PolicyTrainer, path: Path) -> dict[str, torch.Tensor]:
    """All tensors of its checkpoint: weights and the optimizer's state."""
    trainer.save(path)
    files = {file.stem: load_file(file) for file in path.glob("*.safetensors")}
    assert files.keys() == {"weights", "optimizer"}
    return {f"{stem}/{name}": tensor for stem, tensors in files.items() for name, tensor in tensors.items()}


def test_split_and_a_float32_copy_train_a_language_model_to_the_same_bits() -> None:
    split, copied = (
        make_narrow(masters.SplitMaster(), lr=lambda step: 1e-4),
        make_narrow(masters.Fp32Copy(), lr=lambda step: 1e-4),
    )
    for seed in range(5):
        ours, theirs = (each.step(make_step(make_group(seed), micro_tokens=32)) for each in (split, copied))
        # The peak is of the process: whoever is measured later has the higher one.
        apart = {"memory/master": 0, "memory/accounted": 0, "memory/peak": 0}
        assert {**ours, **apart} == {**theirs, **apart}
        assert ours["update/lost_energy"] == 0
        assert ours["memory/master"] == pytest.approx(ours["memory/weights"], rel=0.01)
        assert theirs["memory/master"] == pytest.approx(2 * theirs["memory/weights"], rel=0.01)
    found, expected = (dict(each.export("live").tensors()) for each in (split, copied))
    assert same(found, expected)


@pytest.mark.parametrize(
    ("kind", "loading"),
    [("split", "fp32 copy"), ("fp32 copy", "split"), ("full", "split"), ("lora", "full"), ("full", "lora")],
)
def test_a_checkpoint_of_another_kind_is_refused_and_changes_nothing(kind: str, loading: str, tmp_path: Path) -> None:
    first, second = TRAINERS[kind](), TRAINERS[loading]()
    for seed, each in enumerate((first, second)):
        each.step(make_step(make_group(seed)))
    first.save(tmp_path / "step-1")
    before = saved(second, tmp_path / "before")
    with pytest.raises(CheckpointError):
        second.load(tmp_path / "step-1")
    assert same(before, saved(second, tmp_path / "after"))


def test_a_trainer_that_never_stepped_can_be_saved_and_loaded(tmp_path: Path) -> None:
    policy, other_policy = make_policy(), make_policy()
    fresh, other = make_trainer(policy, version=3), make_trainer(other_policy)
    fresh.save(tmp_path / "step-3")
    other.step(make_step(make_group(1)))
    other.load(tmp_path / "step-3")
    assert other.version == 3
    for trainer in (fresh, other):
        trainer.step(make_step(make_group(2)))
    assert same(snapshot(policy), snapshot(other_policy))


def small_model(**options: object) -> CausalPolicy:
    """With tied weights and a renamed layout, as models of the hub have them."""
    return CausalPolicy(make_model("tiny", TOKENIZER, 0), TOKENIZER, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks by that name
@pytest.mark.parametrize("lora", [None, LORA], ids=["a whole model", "an adapter"])
def test_the_deployable_copy_of_a_snapshot_is_what_was_trained_then(lora: LoraSpec | None, tmp_path: Path) -> None:
    policy = small_model(lora=lora)
    trainer = make_trainer(policy, lr=lambda step: 5e-2)
    for seed in range(2):
        trainer.step(make_step(make_group(seed)))
    write, then = trainer.snapshot(), logits(policy.module)
    policy.export(tmp_path / "export")
    trainer.step(make_step(make_group(3)))  # what is written is not what the weights are by now
    (tmp_path / "step-2").mkdir()
    write(tmp_path / "step-2")
    found = tmp_path / "step-2" / "deploy"
    whole = transformers.AutoModelForCausalLM
    if lora is None:
        loaded = whole.from_pretrained(found)
        assert set(load_file(found / "model.safetensors")) == set(load_file(tmp_path / "export" / "model.safetensors"))
    else:
        loaded = peft.PeftModel.from_pretrained(make_model("tiny", TOKENIZER, 0), found)
        theirs = load_file(tmp_path / "export" / "adapter" / "adapter_model.safetensors")
        assert same(load_file(found / "adapter_model.safetensors"), theirs)
    assert not torch.equal(logits(policy.module), then)
    torch.testing.assert_close(logits(loaded), then, rtol=0, atol=1e-6)
    assert transformers.AutoTokenizer.from_pretrained(found).chat_template == TOKENIZER.chat_template
    files = {path.name for path in found.iterdir()}
    assert files >= {path.name for path in (tmp_path / "export" / ("adapter" if lora else ".")).glob("*.json")}


def test_a_second_snapshot_takes_the_memory_of_the_first(tmp_path: Path) -> None:
    """So what the first one writes afterwards is what the second one copied."""
    policy = make_policy()
    trainer = make_trainer(policy)
    trainer.step(make_step(make_group(0)))
    writes = [trainer.snapshot()]
    trainer.step(make_step(make_group(1)))
    writes.append(trainer.snapshot())
    for number, write in enumerate(writes):
        (tmp_path / f"{number}").mkdir()
        write(tmp_path / f"{number}")
    for file in ("weights", "optimizer"):
        first, second = (load_file(tmp_path / f"{number}" / f"{file}.safetensors") for number in range(2))
        assert same(first, second)
    trained = dict(policy.trainable())
    assert same(load_file(tmp_path / "1" / "weights.safetensors"), trained)
