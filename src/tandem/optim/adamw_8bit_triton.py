# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
"""AdamW with moments of 8 bits in one launch: decoded, used and encoded again without leaving the chip.

It gives the same codes as optim/adamw_8bit.py. A number's logarithm gives a guess of its code, which the same bounds
then correct. Imported only where tensors are on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.optim.adamw_triton import numbers_of, places_of, read, stepped, tables, write
from tandem.optim.update_rule import Whole
from tandem.spec.optim import AdamWSpec

BLOCK = 256
_ROWS = 8  # blocks at a time
_STATE = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")

Codes = tuple[Tensor, Tensor]
"""Shares and the bounds between them."""


def update(wholes: Sequence[Whole], spec: AdamWSpec, signed: Codes, positive: Codes) -> Tensor:
    """Update `wholes`, whose rows are whole blocks. Return the same sums as optim/adamw_triton.py."""
    kinds: defaultdict[tuple[bool, bool], list[Whole]] = defaultdict(list)
    for whole in wholes:
        kinds[whole.low is not None, whole.grad.dtype == torch.bfloat16].append(whole)
    sums = [_launch(alike, spec, signed, positive, *kind) for kind, alike in kinds.items()]
    return torch.stack(sums).sum(0)


def _launch(
    wholes: Sequence[Whole], spec: AdamWSpec, signed: Codes, positive: Codes, split: bool, narrow: bool
) -> Tensor:
    owners, table, floats, sums = tables(wholes, spec, _STATE, BLOCK * _ROWS)
    aligned = all(not tensor.data_ptr() % 16 for whole in wholes for tensor in (whole.live, whole.grad))
    aligned &= all(whole.low is None or not whole.low.data_ptr() % 16 for whole in wholes)
    with torch.cuda.device_of(table):
        _update[(len(owners),)](
            table, floats, owners, sums, *signed, *positive,
            *spec.betas, *(1 - beta for beta in spec.betas), spec.eps,
            SPLIT=split, NARROW=narrow, ALIGNED=aligned, ROWS=_ROWS, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return sums.sum(0, dtype=torch.float64)


@triton.jit
def _decoded(codes, scales, shares, at, block, inside_2, inside):
    index = tl.load(codes + at, mask=inside_2, other=0).to(tl.int32)
    scale = tl.load(scales + block, mask=inside, other=0)
    return tl.load(shares + index) * scale[:, None]


@triton.jit
def _between(part, bounds, guess, last, up_at_equal):
    """Return how many of the bounds are below `part` (or equal to it); `guess` is at most two off."""
    found = tl.minimum(tl.maximum(guess - 2, 0), last)
    for _ in tl.static_range(5):
        bound = tl.load(bounds + tl.minimum(found, last - 1))
        further = (part > bound) | (up_at_equal & (part == bound))
        found += ((found < last) & further).to(tl.int32)
    return found


@triton.jit
def _update(
    table, floats, owners, sums, signed_shares, signed_bounds, shares, bounds,
    beta1, beta2, rest1, rest2, eps,
    SPLIT: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    owner = tl.load(owners + tile)
    live, low, grad, count, first, state = places_of(table, owner, 4, SPLIT, NARROW, ALIGNED)
    mean_codes = tl.load(state).to(tl.pointer_type(tl.uint8))
    mean_scales = tl.load(state + 1).to(tl.pointer_type(tl.float32))
    square_codes = tl.load(state + 2).to(tl.pointer_type(tl.uint8))
    square_scales = tl.load(state + 3).to(tl.pointer_type(tl.float32))
    step_size, decay, unbiased, scale = numbers_of(floats, owner)
    mean_codes, square_codes = tl.multiple_of(mean_codes, 16), tl.multiple_of(square_codes, 16)

    block = (tile - first) * ROWS + tl.arange(0, ROWS)
    inside = block < count // BLOCK
    at = block[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside_2 = inside[:, None] & (tl.arange(0, BLOCK)[None, :] < BLOCK)
    then, old = read(live, low, at, inside_2, SPLIT)
    pull = tl.load(grad + at, mask=inside_2, other=0).to(tl.float32) * scale
    mean = _decoded(mean_codes, mean_scales, signed_shares, at, block, inside_2, inside)
    square = _decoded(square_codes, square_scales, shares, at, block, inside_2, inside)
    mean = beta1 * mean + rest1 * pull
    square = beta2 * square + rest2 * pull * pull
    new = stepped(old, mean, square, step_size, decay, unbiased, eps)
    kept, serves = write(live, low, at, inside_2, new, SPLIT)

    tiny = 1.1754943508222875e-38
    greatest = tl.max(tl.abs(mean), axis=1)
    tl.store(mean_scales + block, greatest, mask=inside)
    part = mean / tl.maximum(greatest, tiny)[:, None]
    # 128 shares in five decades, the smallest of which stands for zero; the bounds of the positive ones come last.
    guess = (tl.log2(tl.maximum(tl.abs(part), 1e-9)) * (127 / 5 * 0.30102999566) + 127.5).to(tl.int32)
    away = _between(tl.abs(part), signed_bounds + 127, guess, 127, part < 0)
    tl.store(mean_codes + at, tl.where(part < 0, 127 - away, 127 + away).to(tl.uint8), mask=inside_2)

    greatest = tl.max(square, axis=1)
    tl.store(square_scales + block, greatest, mask=inside)
    part = square / tl.maximum(greatest, tiny)[:, None]
    guess = (tl.log2(tl.maximum(part, 1e-12)) * (255 / 10 * 0.30102999566) + 255.5).to(tl.int32)
    tl.store(square_codes + at, _between(part, bounds, guess, 255, part < 0).to(tl.uint8), mask=inside_2)

    way = tl.where(inside_2, new - old, 0.0)
    changed = inside_2 & (kept != old)
    pulled = inside_2 & (pull != 0)
    out = sums + tile * 6
    tl.store(out, tl.sum(way * way))
    tl.store(out + 1, tl.sum((new - kept) * way))
    tl.store(out + 2, tl.sum(pulled.to(tl.float32)))
    tl.store(out + 3, tl.sum((pulled & changed).to(tl.float32)))
    tl.store(out + 4, tl.sum((inside_2 & (serves != then)).to(tl.float32)))
    tl.store(out + 5, tl.sum(changed.to(tl.float32)))
