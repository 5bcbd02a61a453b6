# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
"""GPU kernels of the two passes of ops/fused_logprobs.py over logits; each reads a logit once.

This module is imported only if tensors are on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.ops.softcap import Curve


def look(raw_CV: Tensor, ids_C: Tensor, curve: Curve, lse_C: Tensor, logprobs_C: Tensor, entropy_C: Tensor) -> None:
    """Fill the last three arguments. An id outside the distribution gets the logprob NaN."""
    if not len(raw_CV):
        return
    assert raw_CV.stride(1) == 1
    with torch.cuda.device_of(raw_CV):
        _look[(len(raw_CV),)](
            raw_CV,
            ids_C.contiguous(),
            lse_C,
            logprobs_C,
            entropy_C,
            raw_CV.stride(0),
            _readable(curve.num_ids, raw_CV),
            curve.num_ids,
            curve.inner,
            curve.outer,
            CAPPED=bool(curve.outer),
            BLOCK=2048,
            num_warps=8,
        )


def slope(
    raw_NB: Tensor, first_id: int, ids_N: Tensor, lse_N: Tensor, grad_N: Tensor, curve: Curve, slope_NB: Tensor
) -> Tensor:
    """Write the gradient of the matrix product's result into `slope_NB`, which may be `raw_NB` itself."""
    rows, columns = raw_NB.shape
    if not rows:
        return slope_NB
    assert raw_NB.stride(1) == slope_NB.stride(1) == 1
    block = 2048
    with torch.cuda.device_of(raw_NB):
        _slope[(rows, triton.cdiv(columns, block))](  # rows on the first axis: the others are limited to 65,535
            raw_NB,
            slope_NB,
            ids_N.contiguous(),
            lse_N,
            grad_N.contiguous(),
            raw_NB.stride(0),
            slope_NB.stride(0),
            first_id,
            min(_readable(columns, raw_NB), _readable(columns, slope_NB)),
            curve.num_ids,
            curve.inner,
            curve.outer,
            CAPPED=bool(curve.outer),
            BLOCK=block,
            num_warps=8,
        )
    return slope_NB


def _readable(columns: int, matrix: Tensor) -> int:
    """Return the number of columns to read: a multiple of 16 if the row has them, because other masks make accesses 4
    bytes wide instead of 16. Values beyond the end are not used."""
    return min(-(-columns // 16) * 16, matrix.stride(0))


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)  # correct at both ends, where exp is 0 or infinite


@triton.jit
def _look(
    raw, ids, lse, logprobs, entropy, pitch, readable, num_ids, inner, outer, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # row * pitch exceeds 2**31 from 14,000 tokens on
    raw += row * pitch
    # Each lane keeps its own partial distribution until the end, so no lane waits for another inside the loop.
    top = tl.full([BLOCK], -1e38, dtype=tl.float32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    moment = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_ids, BLOCK):
        at = start + tl.arange(0, BLOCK)
        named = at < num_ids
        logit = tl.load(raw + at, mask=at < readable, other=0.0).to(tl.float32) * inner
        if CAPPED:
            logit = outer * _tanh(logit)
        offered = tl.where(named, logit, -1e38)
        logit = tl.where(named, logit, 0.0)
        # One of exp(top - new_top) and exp(logit - new_top) is 1; this is the other.
        other = tl.exp(-tl.abs(offered - top))
        rises = offered > top
        mass = tl.where(rises, mass * other + 1.0, mass + other)
        moment = tl.where(rises, moment * other + logit, moment + other * logit)
        top = tl.maximum(top, offered)
    highest = tl.max(top, axis=0)
    share = tl.exp(top - highest)
    total = tl.sum(mass * share, axis=0)
    log_z = highest + tl.log(total)
    target = tl.load(ids + row)
    known = (target >= 0) & (target < num_ids)
    chosen = tl.load(raw + target, mask=known, other=float("nan")).to(tl.float32) * inner
    if CAPPED:
        chosen = outer * _tanh(chosen)
    tl.store(lse + row, log_z)
    tl.store(logprobs + row, chosen - log_z)
    tl.store(entropy + row, log_z - tl.sum(moment * share, axis=0) / total)


@triton.jit
def _slope(
    raw,
    out,
    ids,
    lse,
    grad,
    raw_pitch,
    out_pitch,
    first_id,
    readable,
    num_ids,
    inner,
    outer,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < readable
    named = inside & (first_id + at < num_ids)
    logit = tl.load(raw + row * raw_pitch + at, mask=inside, other=0.0).to(tl.float32) * inner
    bend = inner
    if CAPPED:
        bent = _tanh(logit)
        bend = (1.0 - bent * bent) * (inner * outer)
        logit = outer * bent
    prob = tl.exp(logit - tl.load(lse + row))
    slope = tl.where(first_id + at == tl.load(ids + row), 1.0 - prob, -prob) * tl.load(grad + row) * bend
    tl.store(out + row * out_pitch + at, tl.where(named, slope, 0.0).to(out.dtype.element_ty), mask=inside)
