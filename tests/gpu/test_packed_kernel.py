"""Packed rows and compiled layers on a GPU against masked rows in float64 and bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from tandem.model.forward import Forward, _mask, _packed
from tandem.ops import packed_attention
from tandem.ops.activation_sizes import Pass, layer_bytes
from tandem.ops.byte_sizes import ModelShape
from tandem.ops.lm_head import Head
from tandem.ops.module_parts import layers_of
from tandem.ops.packed_attention import attend, pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own code
]


def module(seed: int = 0, **more: Any) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    config = Qwen3Config(
        vocab_size=512, num_hidden_layers=3, max_position_embeddings=4096, dtype="bfloat16",
        **{**sizes, "num_key_value_heads": 2, **more},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    with torch.device("cuda"):
        made: Any = Qwen3ForCausalLM(config)
    for parameter in made.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.1)
    return made.to(torch.bfloat16).eval()


def hidden_of(model: Any) -> Callable[..., Tensor]:
    return Head(model, model.config.vocab_size).hidden


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Two trees and plain sequences, of hundreds of tokens."""
    segments = [[0] * 130 + [1] * 70 + [2] * 300 + [-1] * 12, [0] * 100 + [1] * 40 + [2] * 41 + [3] * 200 + [-1] * 131]
    parents = [[0] * 500 + [-1] * 12, [0] * 181 + [3] * 200 + [-1] * 131]
    positions = [
        [*range(130), *range(130, 200), *range(130, 430)] + [0] * 12,
        [*range(100), *range(100, 140), *range(100, 141), *range(200)] + [0] * 131,
    ]
    segments_BT, parents_BT, positions_BT = (
        torch.tensor(each, device="cuda") for each in (segments, parents, positions)
    )
    return segments_BT, parents_BT, positions_BT


@pytest.mark.parametrize("window", [None, 64])
def test_the_kernel_and_its_gradient(window: int | None) -> None:
    segments_BT, parents_BT, _ = rows()
    packed = pack(segments_BT.cpu(), parents_BT.cpu(), segments_BT.device)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        size = (1, heads, len(packed.tokens_T), 64)
        return torch.randn(size, generator=generator, device="cuda").to(torch.bfloat16).requires_grad_()

    query, key, value = draw(8), draw(2), draw(2)
    out, _ = attend(None, query, key, value, None, spans=packed.spans, sliding_window=window)
    wide = [each.detach().double().requires_grad_() for each in (query, key, value)]
    owner, parent = (each.flatten()[packed.tokens_T] for each in (segments_BT, parents_BT))
    row = packed.tokens_T // segments_BT.shape[1]
    order = torch.arange(len(owner), device="cuda")
    same = (owner[:, None] == owner) | (parent[:, None] == owner)
    allowed = same & (row[:, None] == row) & (order[:, None] >= order)
    if window is not None:
        positions = rows()[2].flatten()[packed.tokens_T]
        allowed &= positions[:, None] - positions < window
    want = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=allowed, enable_gqa=True).transpose(1, 2)
    pull = torch.randn(want.shape, generator=generator, device="cuda")
    got = torch.autograd.grad((out.float() * pull).sum(), (query, key, value))
    wanted = torch.autograd.grad((want * pull).sum(), wide)
    for ours, theirs in zip((out, *got), (want, *wanted), strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_and_masked_models_agree(compiled: bool, recompute: bool) -> None:
    plain, fast = module(), module()
    if recompute:
        getattr(fast, "activation_checkpointing_enable", fast.gradient_checkpointing_enable)({"use_reentrant": False})
    made = Forward(fast, packed=True, compiled=compiled)
    assert made.why_masked == ""
    assert made.why_not_compiled == ("" if compiled else "model.compile = false")
    segments_BT, parents_BT, positions_BT = rows()
    ids_BT = torch.randint(0, 512, segments_BT.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    packed = pack(segments_BT.cpu(), parents_BT.cpu(), segments_BT.device)
    for layer in layers_of(fast):
        layer.training = recompute
    ours = _packed(hidden_of(fast), ids_BT, positions_BT, packed)
    wide = copy.deepcopy(plain).double()
    mask, at = _mask(wide.config, segments_BT, parents_BT, positions_BT)
    bodies = [
        each.base_model(input_ids=ids_BT, position_ids=at, attention_mask=mask, use_cache=False)
        for each in (wide, plain)
    ]
    exact, masked = (each.last_hidden_state.flatten(0, 1)[packed.tokens_T] for each in bodies)

    def gradients(hidden: Tensor, of: Any) -> Tensor:
        pull = torch.randn(hidden.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
        found = torch.autograd.grad(
            (hidden * pull).sum(), [each for each in of.parameters() if each.requires_grad], allow_unused=True
        )
        return torch.cat([each.double().flatten() for each in found if each is not None])

    far = [float((each.double() - exact).norm() / exact.norm()) for each in (ours, masked)]
    assert far[0] < 1.3 * far[1] + 1e-3, far  # no further from the truth than what it replaces
    truth = gradients(exact, wide)
    far = [float((gradients(*each) - truth).norm() / truth.norm()) for each in ((ours, fast), (masked, plain))]
    assert far[0] < 1.3 * far[1] + 1e-3, far


@pytest.mark.parametrize("activations", ["keep", "selective"])
def test_compiled_layers_keep_what_the_plan_counts(activations: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch._dynamo.reset()
    fast = module(**sizes, head_dim=128)
    made = Forward(fast, packed=True, compiled=True, selective=activations == "selective")
    assert made.why_not_compiled == ""
    count, layers = 4096, 3
    ids_BT = torch.randint(0, 512, (1, count), device="cuda")
    places_BT = torch.arange(count, device="cuda")[None]
    one = torch.zeros(1, count, dtype=torch.long)
    packed = pack(one, one, ids_BT.device)
    kept: list[int] = []
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        hidden = _packed(hidden_of(fast), ids_BT, places_BT, packed)
        kept.append(torch.cuda.memory_allocated() - before)
        hidden.float().sum().backward()
        fast.zero_grad(set_to_none=True)
    shape = ModelShape(512, 512, 1536, layers, 4, 2, 128, tied=False, qk_norm=True)
    counted = layer_bytes(shape, Pass(2, activations=activations, compiled=True)) * layers * count
    ends = count * (2 + 4 + 2) * 512  # the last norm in fp32 and what it gives, and the embedding's rows
    assert abs(kept[-1] - ends - counted) < 0.05 * counted, (kept, counted)


def test_copies_compute_with_their_own_weights() -> None:
    """A reference is a copy: were its layers' compiled calls the policy's, it would follow the policy."""
    fast = module()
    assert Forward(fast, packed=True, compiled=True).why_not_compiled == ""
    frozen = copy.deepcopy(fast)
    segments_BT, parents_BT, positions_BT = rows()
    packed = pack(segments_BT.cpu(), parents_BT.cpu(), segments_BT.device)
    ids_BT = torch.ones_like(segments_BT)
    with torch.no_grad():
        before = _packed(hidden_of(frozen), ids_BT, positions_BT, packed)
        for parameter in fast.parameters():
            parameter.mul_(1.5)
        assert torch.equal(_packed(hidden_of(frozen), ids_BT, positions_BT, packed), before)
        assert not torch.equal(_packed(hidden_of(fast), ids_BT, positions_BT, packed), before)


def test_float32_is_masked() -> None:
    assert packed_attention.why_not(module().float()).startswith("the kernel computes in 16 bits")
