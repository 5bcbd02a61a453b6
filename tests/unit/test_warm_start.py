"""`model.warm_start` and `model.path`: every weight comes from the file, and a file that cannot give it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainers import make_group, make_step

from tandem.build import built_model
from tandem.build.reference import set_reference
from tandem.errors import SpecError
from tandem.model.load_checkpoint import load_model
from tandem.model.policy import CausalPolicy
from tandem.model.presets import make_model
from tandem.spec.algorithm import DistillSpec
from tandem.spec.model import LoraSpec, ModelSpec, PathModel, PresetModel
from tandem.spec.precision import Bfloat16Precision, Float32Precision, PrecisionSpec
from tandem.text.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
CPU = torch.device("cpu")
LORA = LoraSpec(rank=4, alpha=8.0)


pytestmark = pytest.mark.usefixtures("one_thread")


def built(spec: ModelSpec, precision: PrecisionSpec | None = None) -> built_model.BuiltModel:
    return built_model.model(spec, precision or Float32Precision(), 0, CPU)


def logits(module: Any) -> Tensor:
    with torch.no_grad():
        return module(input_ids=torch.arange(40)[None]).logits.float()


def weights(module: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full export of other weights than the preset begins with."""
    path = tmp_path_factory.mktemp("full")
    CausalPolicy(make_model("tiny", TOKENIZER, seed=7), TOKENIZER).export(path)
    return path


def move_b(policy: CausalPolicy) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in policy.trainable():
            if ".lora_B." in name:
                tensor.normal_(std=0.05)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """The export of a LoRA policy on the preset's own weights, and the logits that it had."""
    path = tmp_path_factory.mktemp("lora")
    policy = CausalPolicy(make_model("tiny", TOKENIZER, seed=0), TOKENIZER, lora=LORA)
    move_b(policy)
    policy.export(path)
    return path, logits(policy.module)


def edited(source: Path, to: Path, edit: Callable[[dict[str, Tensor]], Any], file: str = "model.safetensors") -> str:
    shutil.copytree(source, to)
    tensors = load_file(to / file)
    edit(tensors)
    save_file(tensors, to / file, metadata={"format": "pt"})
    return str(to)


def refusal(spec: ModelSpec) -> str:
    with pytest.raises(SpecError) as refused:
        built(spec)
    return str(refused.value)


# --- full checkpoints


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_full_warm_start_is_the_checkpoint_and_trains_every_weight(exported: Path, attention: Any):
    model = built(PresetModel(preset="tiny", warm_start=str(exported), attention=attention))
    theirs = make_model("tiny", TOKENIZER, seed=7, attention=attention).eval()
    assert torch.equal(logits(model.policy.module), logits(theirs))
    assert model.policy.module.config._attn_implementation == attention
    assert len(model.policy.trainable()) == len(list(theirs.named_parameters()))


def test_a_warm_start_in_16_bits_keeps_what_they_lack(exported: Path):
    """The exact weights reach `narrow`: live and remainder together are the checkpoint to the bit, where it has lower
    bits. Ones have none, and by chance a few other weights."""
    model = built(PresetModel(preset="tiny", warm_start=str(exported)), Bfloat16Precision())
    exact = weights(make_model("tiny", TOKENIZER, seed=7))
    without = total = 0
    for name, tensor in model.policy.module.named_parameters():
        assert tensor.dtype == torch.bfloat16
        lacks = exact[name].view(torch.int32) & 0xFFFF != 0
        assert torch.equal(model.master.read(name, tensor)[lacks], exact[name][lacks]), name
        if "norm" not in name:
            without, total = without + int((~lacks).sum()), total + lacks.numel()
    assert without < total / 5_000


def test_adapters_can_be_new_on_a_full_warm_start(exported: Path):
    model = built(PresetModel(preset="tiny", warm_start=str(exported), lora=LORA))
    torch.testing.assert_close(logits(model.policy.module), logits(make_model("tiny", TOKENIZER, 7).eval()))
    assert all(".lora_" in name for name, _ in model.policy.trainable())


FULL_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "a renamed key": (
        lambda t: t.update({"model.norm.wait": t.pop("model.norm.weight")}),
        "weights are 1 missing from it (model.norm.weight); 1 in it and unknown to the model (model.norm.wait)",
    ),
    "missing keys": (
        lambda t: [t.pop(f"model.layers.{n}.mlp.up_proj.weight") for n in range(4)],
        "weights are 4 missing from it (model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight, "
        "model.layers.2.mlp.up_proj.weight, ...)",
    ),
    "a key too many": (
        lambda t: t.update({"value_head.weight": torch.ones(3)}),
        "weights are 1 in it and unknown to the model (value_head.weight)",
    ),
    "another shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(64)}),
        "weights are 1 of another shape in it (model.norm.weight)",
    ),
}


@pytest.mark.parametrize(("fault", "told"), FULL_FAULTS.values(), ids=FULL_FAULTS.keys())
def test_a_checkpoint_that_does_not_match_is_refused_by_name(exported: Path, tmp_path: Path, fault: Any, told: str):
    source = edited(exported, tmp_path / "faulty", fault)
    said = refusal(PresetModel(preset="tiny", warm_start=source))
    assert said == f"model.warm_start = '{source}': is no whole checkpoint of Qwen3ForCausalLM: {told}"


@pytest.mark.parametrize("name", ["a renamed key", "missing keys", "another shape"])
def test_a_model_path_that_lacks_weights_is_refused_too(exported: Path, tmp_path: Path, name: str):
    """transformers would fill them with random numbers, and log a line."""
    source = edited(exported, tmp_path / "faulty", FULL_FAULTS[name][0])
    said = refusal(PathModel(path=source))
    told = FULL_FAULTS[name][1].split("; 1 in it and unknown")[0]
    assert said == f"model.path = '{source}': is no whole checkpoint of Qwen3ForCausalLM: {told}"


def test_a_model_path_may_hold_more_than_the_model_has_use_for(exported: Path, tmp_path: Path):
    source = edited(exported, tmp_path / "more", FULL_FAULTS["a key too many"][0])
    assert torch.equal(logits(built(PathModel(path=source)).policy.module), logits(make_model("tiny", TOKENIZER, 7)))


def test_a_truncated_file_is_refused(exported: Path, tmp_path: Path):
    shutil.copytree(exported, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    assert "no causal language model can be loaded from it" in refusal(PathModel(path=str(tmp_path / "cut")))


def test_a_checkpoint_that_is_the_model_already_is_refused(tmp_path: Path):
    CausalPolicy(make_model("tiny", TOKENIZER, seed=0), TOKENIZER).export(tmp_path)
    said = refusal(PresetModel(preset="tiny", warm_start=str(tmp_path)))
    assert "all its 46 weights equal the model's own" in said


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("num_attention_heads", 8, "its num_attention_heads is 8, this model's 4"),
        ("rms_norm_eps", 0.1, "its rms_norm_eps is 0.1, this model's 1e-06"),
        ("tie_word_embeddings", False, "its tie_word_embeddings is False, this model's True"),
        ("model_type", "qwen2", "its model_type is qwen2, this model's qwen3"),
    ],
)
def test_equal_shapes_that_mean_something_else_are_refused(
    exported: Path, tmp_path: Path, key: str, value: Any, told: str
):
    shutil.copytree(exported, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    assert told in refusal(PresetModel(preset="tiny", warm_start=str(tmp_path / "other")))


def test_another_size_is_refused(tmp_path: Path):
    CausalPolicy(make_model("small", TOKENIZER, seed=0), TOKENIZER).export(tmp_path)
    assert "num_attention_heads is 5, this model's 4" in refusal(PresetModel(preset="tiny", warm_start=str(tmp_path)))


def test_what_is_nothing_is_refused(tmp_path: Path):
    assert "has no config.json" in refusal(PresetModel(preset="tiny", warm_start=str(tmp_path)))


def test_a_run_is_not_its_export(tmp_path: Path):
    (tmp_path / "status.json").write_text("{}")
    assert "is a run; name its export/" in refusal(PresetModel(preset="tiny", warm_start=str(tmp_path)))


# --- adapters


def test_an_adapter_goes_on_where_it_stopped(adapted: tuple[Path, Tensor]):
    path, expected = adapted
    model = built(PresetModel(preset="tiny", lora=LORA, warm_start=str(path / "adapter")))
    assert torch.equal(logits(model.policy.module), expected)
    assert {name.split(".")[-3] for name, _ in model.policy.trainable()} == {"lora_A", "lora_B"}


def test_an_adapter_is_merged_where_every_weight_is_trained(adapted: tuple[Path, Tensor]):
    path, expected = adapted
    model = built(PresetModel(preset="tiny", warm_start=str(path / "adapter")))
    torch.testing.assert_close(logits(model.policy.module), expected, atol=1e-5, rtol=0)
    assert [name for name, _ in model.policy.trainable()] == [
        name for name, _ in make_model("tiny", TOKENIZER, 0).named_parameters()
    ]


def test_the_merged_export_of_an_adapter_run_is_a_full_warm_start(adapted: tuple[Path, Tensor]):
    path, expected = adapted
    model = built(PresetModel(preset="tiny", warm_start=str(path)))
    torch.testing.assert_close(logits(model.policy.module), expected, atol=1e-5, rtol=0)


def test_the_reference_of_a_warm_started_adapter_is_where_it_started(adapted: tuple[Path, Tensor]):
    """With the adapter off, the base would be the reference: another policy."""
    path, expected = adapted
    policy = built(PresetModel(preset="tiny", lora=LORA, warm_start=str(path / "adapter"))).policy
    (probe,) = make_step(make_group(99), micro_tokens=1000).micro
    assert torch.equal(logits(policy.module), expected)
    then = policy.score(probe, 1.0)
    policy.keep_reference()
    with torch.no_grad():
        for _, tensor in policy.trainable():
            tensor.mul_(2)
    assert torch.equal(policy.reference_logprobs(probe, 1.0), then)
    assert not torch.allclose(policy.score(probe, 1.0), then, atol=1e-3)
    assert policy.reference_bytes() == sum(4 * tensor.numel() for _, tensor in policy.trainable())


def zero_b(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.zero_()


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"

ADAPTER_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "a renamed key": (
        lambda t: t.update({FIRST.replace("weight", "wait"): t.pop(FIRST)}),
        f"1 missing from it ({FIRST}); 1 in it and unknown to the model ({FIRST.replace('weight', 'wait')})",
    ),
    "a missing key": (lambda t: t.pop(FIRST), f"weights are 1 missing from it ({FIRST})"),
    "another shape": (
        lambda t: t.update({FIRST: torch.ones(4, 64)}),
        f"weights are 1 of another shape in it ({FIRST})",
    ),
    "a layer that is not there": (
        lambda t: t.update({FIRST.replace("layers.0", "layers.9"): torch.ones(4, 512)}),
        f"weights are 1 in it and unknown to the model ({FIRST.replace('layers.0', 'layers.9')})",
    ),
    "a zero adapter": (zero_b, "its adapter changes nothing: B·A is zero in every one of its layers"),
}


@pytest.mark.parametrize("lora", [LORA, None], ids=["trained on", "merged"])
@pytest.mark.parametrize(("fault", "told"), ADAPTER_FAULTS.values(), ids=ADAPTER_FAULTS.keys())
def test_an_adapter_that_does_not_match_is_refused_by_name(
    adapted: tuple[Path, Tensor], tmp_path: Path, lora: LoraSpec | None, fault: Any, told: str
):
    source = edited(adapted[0] / "adapter", tmp_path / "faulty", fault, "adapter_model.safetensors")
    said = refusal(PresetModel(preset="tiny", lora=lora, warm_start=source))
    assert said.startswith(f"model.warm_start = '{source}'")
    assert told in said


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        (LoraSpec(rank=8, alpha=8.0), "model.lora.rank = 8: the adapter of model.warm_start = '{}' has 4;"),
        (LoraSpec(rank=4, alpha=16.0), "model.lora.alpha = 16: the adapter of model.warm_start = '{}' has 8;"),
        (
            LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "v_proj")),
            "model.lora.targets: they are q_proj, v_proj; in the adapter of model.warm_start = '{}' they are "
            "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj;",
        ),
    ],
    ids=["rank", "alpha", "targets"],
)
def test_an_adapter_of_other_settings_is_refused_with_both(adapted: tuple[Path, Tensor], lora: LoraSpec, told: str):
    source = str(adapted[0] / "adapter")
    said = refusal(PresetModel(preset="tiny", lora=lora, warm_start=source))
    assert said.startswith(told.format(source))


@pytest.mark.parametrize(("key", "value"), [("use_rslora", True), ("alpha_pattern", {"q_proj": 3}), ("bias", "all")])
def test_an_adapter_that_scales_otherwise_is_refused(
    adapted: tuple[Path, Tensor], tmp_path: Path, key: str, value: Any
):
    """The tensors are the same; what they do is not."""
    shutil.copytree(adapted[0] / "adapter", tmp_path / "other")
    file = tmp_path / "other" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    said = refusal(PresetModel(preset="tiny", lora=LORA, warm_start=str(tmp_path / "other")))
    assert f"its adapter has {key} = {value}, which cannot be trained" in said


def test_an_adapter_of_modules_that_the_model_has_not_is_refused(adapted: tuple[Path, Tensor], tmp_path: Path):
    shutil.copytree(adapted[0] / "adapter", tmp_path / "other")
    file = tmp_path / "other" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["c_attn"]}))
    assert "does not fit this model" in refusal(PresetModel(preset="tiny", warm_start=str(tmp_path / "other")))


@pytest.mark.parametrize("lora", [LORA, None], ids=["trained on", "merged"])
@pytest.mark.parametrize("table", ["model.embed_tokens", "lm_head"])
def test_an_adapter_on_a_table_is_refused(
    adapted: tuple[Path, Tensor], tmp_path: Path, lora: LoraSpec | None, table: str
):
    """The two are one weight here: merged into it, the adapter of one is on both."""
    shutil.copytree(adapted[0] / "adapter", tmp_path / "other")
    file = tmp_path / "other" / "adapter_config.json"
    config = json.loads(file.read_text())
    leaf = table.rpartition(".")[2]
    file.write_text(json.dumps(config | {"target_modules": [*config["target_modules"], leaf]}))
    tensors = load_file(tmp_path / "other" / "adapter_model.safetensors")
    kind = "lora_embedding_" if "embed" in table else "lora_"
    for part, shape in (("A", (4, 128)), ("B", (len(TOKENIZER), 4))):
        suffix = "" if "embed" in table else ".weight"
        tensors[f"base_model.model.{table}.{kind}{part}{suffix}"] = torch.ones(shape)
    save_file(tensors, tmp_path / "other" / "adapter_model.safetensors", metadata={"format": "pt"})
    said = refusal(PresetModel(preset="tiny", lora=lora, warm_start=str(tmp_path / "other")))
    assert f"its adapter is also on {leaf}, but only linear layers other than the head are supported" in said


def test_an_adapter_is_no_model_path(adapted: tuple[Path, Tensor], tmp_path: Path):
    """transformers would load whatever base model the adapter names."""
    shutil.copytree(adapted[0] / "adapter", tmp_path / "adapter")
    TOKENIZER.save_pretrained(tmp_path / "adapter")
    said = refusal(PathModel(path=str(tmp_path / "adapter")))
    assert "its base; set model.path to the model that it was trained on, and model.warm_start = " in said
    with pytest.raises(SpecError, match=r"^algorithm.teacher = '.*': is an adapter, .*; merge it into its base"):
        load_model(str(tmp_path / "adapter"), "main", "sdpa", "algorithm.teacher")


def test_a_teacher_without_a_tokenizer_is_refused_under_its_own_field(tmp_path: Path):
    model = built(PresetModel(preset="tiny"))
    with pytest.raises(SpecError, match=r"^algorithm.teacher = '.*': there is no such directory"):
        set_reference(DistillSpec(teacher=str(tmp_path / "nowhere")), model, Float32Precision())
    with pytest.raises(SpecError, match=r"^model.path = '.*': there is no such directory"):
        built(PathModel(path=str(tmp_path / "nowhere")))


def test_a_warm_start_from_a_path_is_refused_where_nothing_differs(exported: Path):
    assert "leave it out" in refusal(PathModel(path=str(exported), warm_start=str(exported)))
