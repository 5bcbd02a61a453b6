"""What a trainer leaves on disk, and goes on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from trainers import (
    TRAINERS,
    make_group,
    make_narrow,
    make_policy,
    make_step,
    make_trainer,
    same,
    snapshot,
)

from tandem.errors import CheckpointError
from tandem.optim import master as masters
from tandem.optim.schedule import lr_share
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
        micro_tokens = 10**6 if trainer._released else 32
        steps = [trainer.step(make_step(make_group(seed), micro_tokens=micro_tokens)) for seed in seeds]
        return [{key: value for key, value in step.items() if not key.startswith(MEASURED)} for step in steps]

    straight = make(lr=lr, version=5)
    expected = run(straight, range(6))
    first = make(lr=lr, version=5)
    found = run(first, range(3))
    first.save(tmp_path / "step-8")
    second = make(lr=lr)
    with torch.no_grad():
        for _, tensor in second._policy.trainable():
            tensor.zero_()  # whatever it was, it comes from the checkpoint
    second.load(tmp_path / "step-8")
    assert second.version == 8
    found += run(second, range(3, 6))
    assert found == expected
    assert second.version == straight.version == 11
    assert same(snapshot(second._policy), snapshot(straight._policy))  # pyright: ignore[reportArgumentType]
    assert same(second._optimizer.state(), straight._optimizer.state())


def test_split_and_a_float32_copy_train_a_language_model_to_the_same_bits() -> None:
    split, copied = (
        make_narrow(masters.Split(), lr=lambda step: 1e-4),
        make_narrow(masters.Fp32Copy(), lr=lambda step: 1e-4),
    )
    for seed in range(5):
        ours, theirs = (each.step(make_step(make_group(seed), micro_tokens=32)) for each in (split, copied))
        assert {**ours, "memory/master": 0, "memory/accounted": 0} == {
            **theirs,
            "memory/master": 0,
            "memory/accounted": 0,
        }
        assert ours["update/lost_energy"] == 0
        assert ours["memory/master"] == pytest.approx(ours["memory/weights"], rel=0.01)
        assert theirs["memory/master"] == pytest.approx(2 * theirs["memory/weights"], rel=0.01)
    assert same(snapshot(split._policy), snapshot(copied._policy))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("saved", "loading"),
    [("split", "fp32 copy"), ("fp32 copy", "split"), ("full", "split"), ("lora", "full"), ("full", "lora")],
)
def test_a_checkpoint_of_another_kind_is_refused_and_changes_nothing(saved: str, loading: str, tmp_path: Path) -> None:
    first, second = TRAINERS[saved](), TRAINERS[loading]()
    for seed, each in enumerate((first, second)):
        each.step(make_step(make_group(seed)))
    first.save(tmp_path / "step-1")
    weights, state = snapshot(second._policy), {name: t.clone() for name, t in second._optimizer.state().items()}  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError):
        second.load(tmp_path / "step-1")
    assert same(weights, snapshot(second._policy))  # pyright: ignore[reportArgumentType]
    assert same(state, second._optimizer.state())


def test_a_trainer_that_never_stepped_can_be_saved_and_loaded(tmp_path: Path) -> None:
    fresh, other = make_trainer(make_policy(), version=3), make_trainer(make_policy())
    fresh.save(tmp_path / "step-3")
    other.step(make_step(make_group(1)))
    other.load(tmp_path / "step-3")
    assert other.version == 3
    for trainer in (fresh, other):
        trainer.step(make_step(make_group(2)))
    assert same(snapshot(fresh._policy), snapshot(other._policy))  # pyright: ignore[reportArgumentType]
