"""A plan of every family of docs/families.md: what it holds and computes, against the trainer's own."""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from family_models import FAMILIES, Bench
from transformers import CONFIG_MAPPING

from tandem.build import built_model, planned_shape, training
from tandem.engine.hf.cache_room import try_states
from tandem.errors import SpecError
from tandem.model import meta_count
from tandem.ops import attention_masks
from tandem.ops.counted_shape import CountedShape, Shape
from tandem.ops.module_parts import layers_of
from tandem.recipes.plan_run import plan_run
from tandem.runs.planner.model_shape import NoPlan, trained_tensors
from tandem.spec.load import parse_spec
from tandem.spec.model import LoraSpec, PathModel
from tandem.spec.parallel import ParallelSpec
from tandem.spec.precision import Float32Precision
from tandem.types import Trajectory

NO_ADAPTERS = ("Falcon-H1",)
TWO_KINDS = (
    "SmolLM3", "Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE", "Gemma2", "Gemma3", "OLMo3", "Gemma4", "Cohere2", "LFM2",
    "Granite 4", "Jamba", "OLMo hybrid", "gpt-oss", "DeepSeek-V3",
)  # fmt: skip
"""Families whose layers are not all alike."""
LLAMA4 = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_local_experts": 2}


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Bench] = {}

    def bench(name: str) -> Bench:
        if name not in made:
            made[name] = Bench(FAMILIES[name], tmp_path_factory.mktemp("family"))
        return made[name]

    return bench


def shape_of(bench: Bench) -> Shape:
    config = json.loads((bench.path / "config.json").read_text())
    return planned_shape.of_config(config, "model", on_gpu=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_knows_every_parameter_of_a_family(benches, name):
    bench = benches(name)
    shape, module = shape_of(bench), bench.plain()
    assert shape.held == sum(tensor.numel() for tensor in module.parameters())
    if isinstance(shape, CountedShape):
        tensors = [*shape.root, *(dims for layer in shape.each_layer for dims in layer)]
        assert sorted(tensors) == sorted(tuple(tensor.shape) for tensor in module.parameters())


def spec_of(bench: Bench, lora: LoraSpec | None = None, **more: Any) -> Any:
    """`more`: of [train]."""
    model = {"path": str(bench.path), **({"lora": lora.model_dump()} if lora else {})}
    data, train = {"path": "rows.jsonl"}, {"steps": 1, "lr": 1e-3, **more}
    return parse_spec({"recipe": "sft", "device": "cpu", "model": model, "data": data, "train": train})


def batches(spec: Any, model: built_model.BuiltModel, rows: int, length: int) -> Any:
    rng, trained = random.Random(0), [False] + [True] * (length - 1)
    ids = [[rng.randrange(256) for _ in range(length)] for _ in range(rows)]
    groups = [[Trajectory(each, trained, [0.0] * length, [-1] * length)] for each in ids]
    return training.batches(spec.train, model, training.sft_algorithm())(groups, 0)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["all", "lora"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("Llama 4", *NO_ADAPTERS)])
def test_what_a_step_of_a_family_accounts_for_is_planned(benches, name, lora):
    planned_step(benches(name), lora)


@pytest.mark.parametrize("name", NO_ADAPTERS)
def test_a_plan_refuses_adapters_as_a_run_does(benches, name):
    planned_step(benches(name), None)
    with pytest.raises(SpecError) as refused:
        built_model.model(spec_of(benches(name), LoraSpec()).model, Float32Precision(), 0, torch.device("cpu"))
    with pytest.raises(SpecError, match=re.escape(str(refused.value))):
        plan_run(spec_of(benches(name), LoraSpec(), batch_size=1), gpu="cpu", row_tokens=64)


def planned_step(bench: Bench, lora: LoraSpec | None) -> None:
    rows, length = 2, 256
    spec = spec_of(bench, lora, batch_size=rows, micro_tokens=rows * length)
    model = built_model.model(spec.model, spec.precision, 0, torch.device("cpu"))
    tensors, tables = model.policy.trainable(), model.policy.tables()
    ours = [(tuple(tensor.shape), tensor.ndim > 1 and name not in tables) for name, tensor in tensors]
    assert sorted(trained_tensors(shape_of(bench), lora)) == sorted(ours)
    trainer = training.trainer(spec.train, model, training.sft_algorithm(), 0, 0)
    found = trainer.step(batches(spec, model, rows, length))
    plan = plan_run(spec, gpu="cpu", row_tokens=length)
    train = next(each for each in plan.phases if each.name == "train")
    for part in ("weights", "optimizer", "gradients", "logits", "activations"):
        assert train.parts[part] == pytest.approx(found[f"memory/{part}"], rel=0.03, abs=1e-5), part


def deeper(bench: Bench, times: int) -> dict[str, Any]:
    """Return the config of a model with several times the layers."""
    config = json.loads((bench.path / "config.json").read_text())
    num = config["num_hidden_layers"]
    more = {key: times * each for key, each in config.items() if isinstance(each, list) and len(each) == num}
    return {**config, **more, "num_hidden_layers": times * num}


ALL_LINEAR, QUERIES = LoraSpec(rank=4), LoraSpec(rank=4, targets=("q_proj",))
LORAS = {"Falcon-H1": (None, QUERIES), "Qwen3-Next": (None, ALL_LINEAR, QUERIES)}
"""With queries alone the layers before the first adapter save nothing: of a hybrid, some of those without adapters."""


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("Llama 4", "Qwen3-VL")])
def test_equal_layers_are_counted_once_and_give_what_each_of_them_gives(benches, name, monkeypatch):
    config = deeper(benches(name), 3 if name in TWO_KINDS else 1)

    def counts() -> list[Any]:
        planned_shape.counted.cache_clear()
        shape = planned_shape.counted(json.dumps(config), name, False)
        loras = LORAS.get(name, (None, ALL_LINEAR))
        return [shape.cached(2), *((shape.trained(lora), shape.count(2, lora)) for lora in loras)]

    module = meta_count.meta_model(config, name)
    meta_count.share_equal_layers(module)
    assert len(layers_of(module)) == 1 + (name in TWO_KINDS)
    once = counts()
    monkeypatch.setattr(meta_count, "share_equal_layers", lambda module: None)
    assert counts() == once


def test_a_layer_with_anything_of_its_own_is_counted_by_itself(benches):
    config = json.loads((benches("Llama").path / "config.json").read_text())

    def num_kept(change: Callable[[Any], None], **more: Any) -> int:
        module = meta_count.meta_model({**config, **more}, "model")
        change(module.model.layers)
        meta_count.share_equal_layers(module)
        return len(layers_of(module))

    def tie(layers: Any) -> None:
        layers[3].mlp.up_proj.weight = layers[0].mlp.up_proj.weight

    assert num_kept(lambda layers: None) == 1
    assert num_kept(lambda layers: None, of_each_layer=[1, 2, 1, 1]) == 2
    assert num_kept(lambda layers: setattr(layers[2].self_attn, "scaling", 0.5)) == 2
    assert num_kept(tie) == 4


def test_an_adapter_of_one_layer_is_of_that_layer_alone(benches):
    shape = shape_of(benches("Qwen3-MoE"))
    assert isinstance(shape, CountedShape)
    one = LoraSpec(rank=4, targets=("layers.2.self_attn.q_proj",))
    assert shape.trained(one) == [((4, 64), True), ((128, 4), True)]
    saved = [layer.saved.token for layer in shape.count(4, one).layers]
    assert saved[0] == saved[1] < saved[2] != saved[3] > 0


WINDOW, NO_WINDOW, ON = {"sliding_window": 64}, {"sliding_window": None}, {"use_sliding_window": True}


@pytest.mark.parametrize("said", [{}, WINDOW, NO_WINDOW, ON, {**ON, **WINDOW}, {**ON, **NO_WINDOW}])
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_a_plan_knows_which_families_have_a_sliding_window(benches, kind, said):
    sizes = json.loads((benches("Llama").path / "config.json").read_text())
    config = {**sizes, "model_type": kind, **said}
    theirs = CONFIG_MAPPING[kind].from_dict(config)
    theirs._attn_implementation = "sdpa"
    assert planned_shape.of_config(config, "model", on_gpu=False).masks != attention_masks.plainly_causal(theirs)


@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2", "Jamba", "Granite 4", "OLMo hybrid"])
def test_a_plan_knows_the_states_that_the_embedded_engine_keeps(benches, name):
    model = benches(name).built()
    layers = model.policy.module.config.num_hidden_layers
    row_bytes, _ = try_states(model.policy.head, layers, model.policy.head.linear.weight)
    assert shape_of(benches(name)).state_bytes(4) == row_bytes > 0


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("Qwen3-MoE", 4 * 2 * 2 * 32), ("Qwen3.5", 2 * 2 * 32), ("gpt-oss", 4 * 2 * 2 * 32), ("DeepSeek-V3", 4 * 576)],
)
def test_only_layers_with_attention_keep_keys_and_values(benches, name, numbers):
    """Layers, keys and values, heads, numbers of a head; of MLA what keys and values are computed from."""
    assert shape_of(benches(name)).position_bytes(4) == 4 * numbers


def test_a_token_is_multiplied_with_its_experts_alone(benches):
    shape = shape_of(benches("Qwen3-MoE"))
    assert isinstance(shape, CountedShape)
    experts = shape.numbers["experts"] * 2 / 4  # two of four
    assert shape.count(4, None).products == shape.numbers["attention"] + shape.numbers["routers"] + experts


def test_a_model_that_computes_meanwhile_is_left_alone(benches):
    bench = benches("Qwen3-MoE")
    module, ids = bench.plain(), torch.arange(40)[None]
    with torch.no_grad():
        expected = module(ids).logits
        with meta_count.without_values(meta_count.meta_model(module.config.to_dict(), "model")):
            assert torch.equal(module(ids).logits, expected)
            with torch.autocast("cpu", torch.bfloat16):
                assert not torch.equal(module(ids).logits, expected)


def test_a_kernel_of_a_package_is_not_asked_to_count(benches, monkeypatch):
    """It is bound where transformers' module is imported, and looks at what is not there on the meta device."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
    from transformers.models.lfm2 import modeling_lfm2

    def causal_conv1d_fn(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError(f"Expected a GPU, got {x.device}")

    package = ModuleType("a_package_with_a_kernel")
    package.__dict__["causal_conv1d_fn"] = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, package.__name__, package)
    in_torch = inspect.unwrap(modeling_lfm2.causal_conv1d_fn)
    bound = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", package.__name__)(in_torch)
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", bound)
    bench = benches("LFM2")
    config = {**json.loads((bench.path / "config.json").read_text()), "max_position_embeddings": 257}  # not counted yet
    shape = planned_shape.of_config(config, "model", on_gpu=False)
    assert isinstance(shape, CountedShape)
    assert shape.count(4, None).products > 0
    assert modeling_lfm2.causal_conv1d_fn is bound


def test_several_ranks_are_refused_as_by_a_run(benches):
    spec = spec_of(benches("Qwen3-MoE"), batch_size=2)
    with pytest.raises(
        SpecError, match=r"parallel\.ranks = 2: Qwen3MoeForCausalLM makes its weights of several tensors"
    ):
        plan_run(spec.model_copy(update={"parallel": ParallelSpec(ranks=2)}), gpu="h200", row_tokens=64)
    plan = plan_run(spec, gpu="h200", row_tokens=64, memory_gib=0.7)
    assert not plan.fits
    assert "makes its weights of several tensors" in plan.why_no_ranks


def test_more_layers_than_any_model_has_are_not_built(benches):
    config = {**json.loads((benches("LFM2").path / "config.json").read_text()), "num_hidden_layers": 100_000}
    with pytest.raises(NoPlan, match="num_hidden_layers = 100000: up to 1,000 layers are counted"):
        planned_shape.of_config(config, "model", on_gpu=False)


def test_a_plan_says_what_it_does_not_know_of_a_family(benches, tmp_path):
    spec = spec_of(benches("Qwen3.5"), batch_size=1)
    told = "\n".join(plan_run(spec, gpu="cpu", row_tokens=64).assumed)
    assert "not with this family" in told
    assert "torch computes the recurrent layers" in told
    for config, why in (
        ({"model_type": "nonesuch"}, "'nonesuch' are not known to the planner, and the layers cannot.*KeyError"),
        ({"model_type": "llama4_text", **LLAMA4}, "a forward pass cannot be counted from its config: AttributeError"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(NoPlan, match=why):
            plan_run(spec.model_copy(update={"model": PathModel(path=str(tmp_path))}), gpu="cpu", row_tokens=64)
