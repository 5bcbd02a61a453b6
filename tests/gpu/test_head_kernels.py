"""The kernels of the lm-head against plain torch in float64, on a GPU.

The results are measured by their distance from float64 over its norm: of what is summed in float32 far under 1e-5, of
gradients that went through bf16 operands under 5e-3.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.ops.fused_logprobs import logits, score

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = "cuda"

SHAPES = {  # tokens, hidden, vocabulary
    "small": (5, 16, 40),
    "odd": (77, 64, 1237),
    "several tiles": (300, 128, 9001),
    "one token": (1, 64, 5000),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"padding": 37},
    "tempered": {"temperature": 0.6, "scale": 0.5},
    "capped": {"softcap": 5.0, "temperature": 1.3, "padding": 3},
}


def inputs(count: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden_NH = torch.randn(count, width, device=DEVICE).to(dtype)
    weight_VH = (torch.randn(vocab, width, device=DEVICE) * 3 / width**0.5).to(dtype)
    ids_N = torch.randint(0, vocab - 37, (count,), device=DEVICE)
    return hidden_NH.requires_grad_(), weight_VH.requires_grad_(), ids_N, torch.randn(count, device=DEVICE)


def both(
    hidden_NH: Tensor, weight_VH: Tensor, ids_N: Tensor, grad_N: Tensor, workspace_bytes: int, options: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Logprobs, entropy, gradients of hidden states and weight: ours and those of float64."""
    num_ids = len(weight_VH) - options.get("padding", 0)
    scale, softcap, temperature = options.get("scale", 1.0), options.get("softcap"), options.get("temperature", 1.0)
    ours = score(
        hidden_NH,
        weight_VH,
        ids_N,
        num_ids=num_ids,
        scale=scale,
        softcap=softcap,
        temperature=temperature,
        workspace_bytes=workspace_bytes,
    )
    our_grads = torch.autograd.grad(ours[0], [hidden_NH, weight_VH], grad_N)
    exact_NH, exact_VH = (tensor.detach().double().requires_grad_() for tensor in (hidden_NH, weight_VH))
    logits_NV = (exact_NH @ exact_VH.t())[:, :num_ids] * scale
    if softcap:
        logits_NV = softcap * (logits_NV / softcap).tanh()
    logprobs_NV = (logits_NV / temperature).log_softmax(-1)
    theirs = logprobs_NV.gather(1, ids_N[:, None]).squeeze(1), -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    their_grads = torch.autograd.grad(theirs[0], [exact_NH, exact_VH], grad_N.double())
    return list(zip([*ours, *our_grads], [*theirs, *their_grads], strict=True))


def distance(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("workspace_bytes", [1, 10**9])
def test_the_kernels_give_what_float64_gives(shape: str, case: str, dtype: torch.dtype, workspace_bytes: int) -> None:
    if SHAPES[shape][2] == 40 and "padding" in CASES[case]:
        pytest.skip("hardly an id left")
    torch.manual_seed(0)
    options = CASES[case]
    pairs = both(*inputs(*SHAPES[shape], dtype), workspace_bytes, options)
    bounds = [1e-5, 1e-5, 5e-3, 5e-3] if dtype == torch.bfloat16 else [1e-5, 1e-5, 1e-4, 1e-4]
    for (ours, theirs), bound in zip(pairs, bounds, strict=True):
        assert distance(ours, theirs) < bound  # NaN is not
    assert not pairs[3][0][SHAPES[shape][2] - options.get("padding", 0) :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_and_gradients_need_not_be_contiguous(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden_NH, weight_VH, ids_N, _ = (tensor.detach() for tensor in inputs(65, 64, 999, dtype))
    strided_NH = hidden_NH.t().contiguous().t().requires_grad_()
    strided_VH = torch.stack([weight_VH, weight_VH], 1)[:, 0].requires_grad_()
    strided_N = torch.stack([ids_N, ids_N], 1)[:, 1]
    grad_N = torch.ones(1, device=DEVICE).expand(65)
    for ours, theirs in both(strided_NH, strided_VH, strided_N, grad_N, 300_000, {}):
        assert distance(ours, theirs) < 5e-3


def test_rows_past_two_billion_logits_are_addressed() -> None:
    """[17,000, 128,512] has more of them than an int32 counts."""
    torch.manual_seed(0)
    hidden_NH, weight_VH, ids_N, grad_N = inputs(17_000, 64, 128_512, torch.bfloat16)
    logprobs_N, entropy_N = score(hidden_NH, weight_VH, ids_N, num_ids=128_500, workspace_bytes=10**11)
    logprobs_N.backward(grad_N)
    assert hidden_NH.grad is not None
    last = slice(16_990, 17_000)
    few_NH = hidden_NH.detach()[last].clone().requires_grad_()
    theirs_N, their_entropy_N = score(few_NH, weight_VH, ids_N[last], num_ids=128_500)
    (theirs_NH,) = torch.autograd.grad(theirs_N, few_NH, grad_N[last])
    assert distance(logprobs_N[last], theirs_N.double()) < 1e-5
    assert distance(entropy_N[last], their_entropy_N.double()) < 1e-5
    assert distance(hidden_NH.grad[last], theirs_NH.double()) < 5e-3


def test_large_logits_are_no_trouble() -> None:
    """Differences of hundreds between logits, and a softcap at its end."""
    torch.manual_seed(0)
    hidden_NH, weight_VH, ids_N, grad_N = inputs(64, 64, 5000, torch.bfloat16)
    loud_NH = (hidden_NH.detach() * 60).requires_grad_()
    for options in ({}, {"softcap": 30.0}):
        for ours, theirs in both(loud_NH, weight_VH, ids_N, grad_N, 10**9, options):
            assert distance(ours, theirs) < 5e-3


def test_no_tokens_and_an_id_outside_the_distribution() -> None:
    hidden_NH, weight_VH, ids_N, grad_N = inputs(0, 64, 500, torch.bfloat16)
    score(hidden_NH, weight_VH, ids_N, num_ids=500)[0].backward(grad_N)
    assert weight_VH.grad is not None
    assert not weight_VH.grad.any()
    hidden_NH, weight_VH, ids_N, _ = inputs(4, 64, 500, torch.bfloat16)
    ids_N[2] = 490
    assert score(hidden_NH, weight_VH, ids_N, num_ids=480)[0].isnan().tolist() == [False, False, True, False]


def test_a_whole_row_of_logits_is_the_one_that_is_scored() -> None:
    torch.manual_seed(0)
    hidden_NH, weight_VH, ids_N, _ = inputs(33, 64, 999, torch.bfloat16)
    whole_NV = logits(hidden_NH, weight_VH)
    assert whole_NV.dtype == torch.float32
    logprobs_N = whole_NV.log_softmax(-1).gather(1, ids_N[:, None]).squeeze(1)
    theirs_N, _ = score(hidden_NH, weight_VH, ids_N, num_ids=999)
    assert distance(logprobs_N, theirs_N.double()) < 1e-6


def test_what_is_held_stays_within_the_workspace() -> None:
    hidden_NH, weight_VH, ids_N, grad_N = inputs(4096, 512, 50_000, torch.bfloat16)
    for workspace_bytes in (60_000_000, 200_000_000):
        for _ in range(2):  # the first call also allocates the workspace of the matrix products
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            logprobs_N, _ = score(hidden_NH, weight_VH, ids_N, num_ids=50_000, workspace_bytes=workspace_bytes)
            grads = torch.autograd.grad(logprobs_N, [hidden_NH, weight_VH], grad_N)
            torch.cuda.synchronize()
            held = torch.cuda.max_memory_allocated() - before - sum(grad.nbytes for grad in grads)
        assert workspace_bytes / 2 < held < workspace_bytes + 2**20
