"""Two families of the suite, in the fast tier; and that its checks can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import family_suite as suite
import pytest
import torch
from family_models import FAMILIES, Bench, Family

from tandem.build import engaged, run_engines, standalone_engines
from tandem.build.built_model import BuiltModel
from tandem.errors import SyncError
from tandem.model.lora import check_only_linear
from tandem.ops import attention_masks
from tandem.ops.byte_sizes import shares_never
from tandem.recipes import engine_commands
from tandem.recipes.engine_commands import OneCheck
from tandem.spec.bridges import BRIDGES
from tandem.spec.load import parse_spec
from tandem.spec.model import LoraSpec
from tandem.spec.run import RlSpec
from tandem.types import Trajectory

pytestmark = pytest.mark.usefixtures("one_thread", "forked_programs")
QUICK = ("trainer", "packing", "prompt trees", "all weights, inproc", "bf16, inproc", "LoRA, inproc", "export")


@pytest.mark.parametrize("name", ["Qwen3", "Gemma2", "Qwen3.5"])
def test_a_family_holds(name: str, tmp_path: Path):
    bench = Bench(FAMILIES[name], tmp_path)
    assert [suite.outcome(cell, bench) for cell in QUICK] == ["yes"] * len(QUICK)


def test_layers_without_their_window_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench = Bench(FAMILIES["Gemma2"], tmp_path)
    for_model = attention_masks.for_model

    def far(*args: Any) -> Any:
        masks = for_model(*args)
        return dict.fromkeys(masks, masks["full_attention"])

    monkeypatch.setattr(attention_masks, "for_model", far)
    with pytest.raises(suite.Different, match="logprobs differ by"):
        suite.outcome("trainer", bench)


def test_an_engine_whose_weights_changed_behind_the_bridge_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The bridge has proven the version; then a weight changes in the memory of the engine's process."""
    asked = suite.asked

    async def changed(engine: Any, trainer: Any) -> Any:
        of_engine = {name: tensor.detach() for name, tensor in trainer.export("live").tensors()}
        trainer.live_in({name: tensor.clone() for name, tensor in of_engine.items()})
        of_engine["lm_head.weight"].mul_(1.01)
        return await asked(engine, trainer)

    monkeypatch.setattr(suite, "asked", changed)
    with pytest.raises(suite.Different, match="logprobs differ by"):
        suite.outcome("shared", Bench(FAMILIES["Qwen3"], tmp_path))


def test_an_engine_that_has_another_base_is_no_refusal_but_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench, other = (Bench(FAMILIES["Qwen3"], tmp_path / name) for name in ("one", "other"))
    module = other.plain()
    with torch.no_grad():
        module.lm_head.weight.mul_(1.01)
    module.save_pretrained(other.path)
    monkeypatch.setattr(run_engines, "starting_directory", lambda *_: other.path)
    with pytest.raises(SyncError, match=r"the engine's base model is not the trainer's: 'lm_head\.weight' differs"):
        suite.outcome("adapter_broadcast", bench)


# --- what no engine in another process serves: refused before one is started


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> Any:
        raise AssertionError("an engine is started")

    monkeypatch.setattr(run_engines, "outside", started)


@pytest.mark.usefixtures("no_engine")
def test_layers_that_the_server_cannot_batch_are_refused_before_it_starts_as_in_process(tmp_path: Path):
    bench = Bench(Family("Bloom", "BloomConfig", attention="eager"), tmp_path)
    names = [name for name, traits in BRIDGES.items() if not traits.in_process]
    (told,) = {suite.outcome(cell, bench) for cell in ("all weights, inproc", *names)}
    assert told.startswith("model: bloom has layers of kind ALiBi, which the embedded engine cannot batch; vLLM may (")


@pytest.mark.usefixtures("no_engine")
def test_adapters_on_stacked_experts_are_refused_before_an_engine_starts(tmp_path: Path):
    bench = Bench(FAMILIES["Qwen3-MoE"], tmp_path)
    (told,) = {suite.outcome(cell, bench) for cell in ("adapter", "adapter_broadcast")}
    assert told == (
        "model.lora.targets = all-linear: 12 adapters are on stacked experts or their router, the first on "
        "'model.layers.0.mlp.experts', and no engine in another process serves those; adapt linear layers only: "
        'model.lora.targets = ["k_proj", "o_proj", "q_proj", "v_proj"]'
    )


def test_adapters_on_the_attention_of_a_mixture_of_experts_are_served(tmp_path: Path):
    bench = Bench(FAMILIES["Qwen3-MoE"], tmp_path)
    suite.served(bench, "adapter_broadcast", LoraSpec(rank=4, targets=("k_proj", "o_proj", "q_proj", "v_proj")))


@pytest.mark.parametrize(
    ("name", "attention"), [("Qwen3-MoE", ["k_proj", "o_proj", "q_proj", "v_proj"]), ("Qwen3", [])]
)
def test_an_engine_is_checked_with_the_adapters_that_it_may_serve(
    name: str, attention: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a mixture of experts those of the attention; on a dense model all."""
    found: list[Any] = []

    async def note(spec: RlSpec, model: BuiltModel, *_: Any, **more: Any) -> list[OneCheck]:
        check_only_linear(model.policy.module, LoraSpec())
        found.append(spec.model.lora)
        return [OneCheck("requests", "passed")]

    monkeypatch.setattr(standalone_engines, "vllm_version", lambda python: "9.9.9")
    monkeypatch.setattr(engine_commands, "served_and_asked", note)
    path = str(Bench(FAMILIES[name], tmp_path).path)
    check = engine_commands.check_engine("/p/python", model=path, bridges=["adapter", "disk"], device="cpu")
    told = f"no vLLM serves them; checked with model.lora.targets = {json.dumps(attention)}"
    left_out = [OneCheck("adapter: adapters on stacked experts", "not here", told)] if attention else []
    passed = [OneCheck(f"{bridge}: requests", "passed") for bridge in ("adapter", "disk")]
    assert list(check.checks) == [*left_out, *passed]
    assert [each and each.targets for each in found] == [tuple(attention) or "all-linear", None]


def test_in_bf16_a_gap_is_found_that_would_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench = Bench(FAMILIES["Qwen3"], tmp_path)
    answers = suite.answers
    monkeypatch.setattr(suite, "answers", lambda *args: [(ours + 0.06, theirs) for ours, theirs in answers(*args)])
    with pytest.raises(suite.Different, match=r"differ by 0\.06\d* nats a token; a run's limit is 0.05 \(16 bits"):
        suite.outcome("bf16, inproc", bench)


def test_a_model_without_sdpa_is_loaded_with_eager_attention_and_a_run_says_so(tmp_path: Path):
    model = Bench(FAMILIES["Gemma2"], tmp_path).built()
    assert model.policy.module.config._attn_implementation == "eager"
    raw = {
        "recipe": "sft", "model": {"path": str(tmp_path / "model")}, "train": {"steps": 1, "lr": 1e-4},
        "data": {"kind": "file", "path": "rows.jsonl"},
    }  # fmt: skip
    noted = {name: (engaged, why) for name, _, engaged, why in engaged.options(parse_spec(raw), model)}
    assert noted["model.attention"] == (False, "transformers chose 'eager' for Gemma2ForCausalLM")


def test_a_hybrid_learns_from_packed_sequences_as_from_single_ones_and_the_run_says_how(tmp_path: Path):
    bench = Bench(FAMILIES["LFM2"], tmp_path)
    cells = ("trainer", "packing", "prompt trees", "SFT", "SFT, LoRA")
    assert [suite.outcome(cell, bench) for cell in cells] == ["yes"] * len(cells)
    assert positions_of(bench.built(), [1000, 100, 90, 980, 110, 30]) < 1.1 * (1000 + 100 + 90 + 980 + 110 + 30)
    raw = {
        "recipe": "sft", "model": {"path": str(tmp_path / "model")}, "train": {"steps": 1, "lr": 1e-4},
        "data": {"kind": "file", "path": "rows.jsonl"},
    }  # fmt: skip
    noted = {name: (engaged, why) for name, _, engaged, why in engaged.options(parse_spec(raw), bench.built())}
    assert noted["packing of sequences"] == (True, "")


def positions_of(model: suite.BuiltModel, lengths: list[int]) -> int:
    """Return how many positions a recurrent layer computes for one micro-batch of sequences of these lengths."""
    rows = [[Trajectory([1] * each, [False, *[True] * (each - 1)], [0.0] * each, [-1] * each)] for each in lengths]
    (micro,) = suite.batch_of(rows, shares_never)
    counted: list[int] = []
    body: Any = model.policy.head.body
    part = body.layers[0].conv.in_proj
    hook = part.register_forward_hook(lambda _part, given, _told: counted.append(given[0].shape[:2].numel()))
    model.policy.score(micro, 1.0)
    hook.remove()
    return sum(counted)
