"""Recurrent layers among others that share rows, and what cannot share rows."""

from __future__ import annotations

import inspect
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, JambaConfig, Lfm2Config, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from tandem.algo import sft
from tandem.build import built_model
from tandem.errors import SpecError
from tandem.model.policy import CausalPolicy
from tandem.ops import recurrent_layers
from tandem.ops.byte_sizes import shares_never, shares_unmasked
from tandem.spec.load import parse_spec
from tandem.spec.model import LoraSpec
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.types import MicroBatch, Trajectory

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
PROMPT = [5, 9, 3, 17, 29]
ANSWERS = ([1, 2, 3, 4, 5, 6, 7], [11, 12, 13], [21], [31, 32, 33, 34, 35, 36, 37, 38, 39])


def hybrid() -> Any:
    torch.manual_seed(3)
    config = Lfm2Config(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=320,
        num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2,
    )  # fmt: skip
    module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for each in module.parameters():
            if each.ndim > 1:  # otherwise what one token leaves for the next is as small as rounding
                each.mul_(8)
    return module


def policy(**given: Any) -> CausalPolicy:
    return CausalPolicy(hybrid(), byte_tokenizer(), **given)


def alibi() -> CausalPolicy:
    torch.manual_seed(3)
    config = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=320)
    return CausalPolicy(AutoModelForCausalLM.from_config(config), byte_tokenizer())


def rows() -> list[Trajectory]:
    return [
        Trajectory(PROMPT + each, [False] * len(PROMPT) + [True] * len(each), [0.0] * (len(PROMPT) + len(each)),
                   [-1] * len(PROMPT) + [0] * len(each))
        for each in ANSWERS
    ]  # fmt: skip


def micro(*groups: list[Trajectory], tree: bool = False) -> MicroBatch:
    shares = shares_unmasked if tree else shares_never
    (found,) = make_batch(list(groups), sft.make(), micro_tokens=4096, version=0, shares=shares, device=CPU).micro
    return found


def scores(model: CausalPolicy, given: MicroBatch) -> list[float]:
    return sorted(model.score(given, 1.0).tolist())


def alone(model: CausalPolicy) -> list[float]:
    return sorted(number for row in rows() for number in scores(model, micro([row])))


def gradients(model: CausalPolicy, *given: MicroBatch) -> dict[str, Tensor]:
    model.module.zero_grad()
    for each in given:
        model.logprobs(each, 1.0).logprobs_N.sum().backward()
    return {name: tensor.grad.clone() for name, tensor in model.trainable() if tensor.grad is not None}


@pytest.mark.parametrize("tree", [False, True])
def test_sequences_of_one_row_are_computed_as_single_ones(tree: bool):
    model = policy()
    assert model.forward.is_recurrent
    together = micro(rows(), tree=True) if tree else micro(*([row] for row in rows()))
    assert together.segments_BT.max() > 0
    assert scores(model, together) == pytest.approx(alone(model), abs=1e-4)


def test_other_layers_compute_a_prompt_once():
    model = policy()
    counted: list[int] = []
    body: Any = model.head.body
    other = body.layers[0].feed_forward
    other.register_forward_hook(lambda _part, given, _told: counted.append(given[0].numel() // 32))
    scores(model, micro(rows(), tree=True))
    assert counted == [len(PROMPT) + sum(map(len, ANSWERS))]


def num_kept(model: CausalPolicy, given: MicroBatch) -> int:
    """Return how many numbers are kept for the gradient."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: (sizes.append(each.numel()), each)[1], lambda each: each
    ):
        model.logprobs(given, 1.0)
    return sum(sizes)


def test_a_layer_that_is_computed_again_for_its_gradient_knows_its_sequences():
    kept, recomputed = policy(), policy(activations="recompute")
    first, second = micro(rows(), tree=True), micro([rows()[0]], [rows()[3]])
    assert num_kept(recomputed, first) < num_kept(kept, first) / 4
    ours, theirs = (gradients(each, first, second) for each in (recomputed, kept))
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    single = gradients(kept, *(micro([row]) for row in (*rows(), rows()[0], rows()[3])))
    for name in single:
        assert (theirs[name] - single[name]).norm() <= 1e-4 * (1 + single[name].norm()), name


def test_a_reference_of_the_same_kind_knows_them_too():
    model, together = policy(), micro(*([row] for row in rows()))
    model.keep_reference()
    before = scores(model, together)
    with torch.no_grad():
        for _, tensor in model.trainable():
            tensor.mul_(1.1)
    assert sorted(model.reference_logprobs(together, 1.0).tolist()) == pytest.approx(before, abs=1e-6)


def test_a_model_whose_layers_are_not_reached_is_told_apart():
    model = policy()
    why = recurrent_layers.engage(model.module, 3, lambda: scores(model, micro(rows(), tree=True)))
    assert why == "2 of its 3 recurrent layers can compute rows of several sequences"


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)])
def test_kernels_without_a_gradient_are_refused_before_the_first_step(lora: LoraSpec | None):
    def no_gradient(_: Tensor) -> None:
        raise RuntimeError("upgrade Triton")

    def planted(_part: Any, _given: Any, told: Tensor) -> None:
        if told.requires_grad:
            told.register_hook(no_gradient)

    module = hybrid()
    module.model.layers[2].conv.in_proj.register_forward_hook(planted)
    with pytest.raises(SpecError, match="no gradient here: RuntimeError: upgrade Triton"):
        CausalPolicy(module, byte_tokenizer(), lora=lora).check_gradient()


@pytest.mark.parametrize("has_gradient", [True, False])
def test_kernels_of_a_package_stay_only_if_they_compute_a_gradient(
    monkeypatch: pytest.MonkeyPatch, *, has_gradient: bool
):
    def no_gradient(_: Tensor) -> None:
        raise RuntimeError("upgrade Triton")

    asked = [0]
    in_torch = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)

    @wraps(in_torch)
    def kernel(*args: Any, **given: Any) -> Any:
        asked[0] += 1
        made, last = in_torch(*args, **given)
        if made.requires_grad and not has_gradient:
            made.register_hook(no_gradient)
        return made, last

    config = Qwen3_5TextConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        vocab_size=320, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    model = CausalPolicy(AutoModelForCausalLM.from_config(config), byte_tokenizer())
    expected = gradients(model, micro(rows()))
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", kernel)
    model.check_gradient()
    asked[0] = 0
    found = gradients(model, micro(rows()))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (model.forward.why_in_torch, asked[0] > 0) == (
        ("", True) if has_gradient else ("RuntimeError: upgrade Triton", False)
    )


def test_an_adapter_that_a_layer_never_uses_does_not_hide_the_others_gradient():
    """Jamba reads the weight of one linear layer, and never calls it."""
    torch.manual_seed(3)
    config = JambaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=320,
        num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1, use_mamba_kernels=False,
    )  # fmt: skip
    CausalPolicy(AutoModelForCausalLM.from_config(config), byte_tokenizer(), lora=LoraSpec(rank=1)).check_gradient()


def test_only_what_is_trained_needs_a_gradient(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: Any) -> None:
        raise SpecError("model.path: no gradient")

    monkeypatch.setattr(CausalPolicy, "check_gradient", refuse)
    asked = {"recipe": "sft", "device": "cpu", "model": {"preset": "tiny"}, "data": {"path": "rows.jsonl"}}
    spec = parse_spec({**asked, "train": {"steps": 1, "lr": 1e-3, "batch_size": 1}})
    built_model.model(spec.model, spec.precision, 0, CPU)
    with pytest.raises(SpecError, match="no gradient"):
        built_model.run_model(spec, None)


def test_distances_in_the_row_leave_each_sequence_a_row():
    model = alibi()
    assert model.forward.why_alone == "bloom has layers of kind ALiBi, so each sequence has a row of its own"
    assert scores(model, micro(*([row] for row in rows()))) == pytest.approx(alone(model), abs=1e-5)


def test_a_context_without_gradient_is_refused(tmp_path: Path):
    model = policy()
    model.context_grad = False
    with pytest.raises(SpecError, match=r"does not support layers of kind conv; set context_grad = 'full'"):
        model.logprobs(micro(rows(), tree=True), 1.0)
