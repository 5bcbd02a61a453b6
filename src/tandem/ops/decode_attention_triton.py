# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
"""The kernel of ops/decode_attention.py. A program takes one row's keys of one head, or a part of them where there are
few rows; the parts are then put together. Only imported if tensors are on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEYS = 64  # positions at a time
_ENOUGH, _MOST_PARTS = 528, 16  # programs that keep a GPU busy: four on each multiprocessor


def attend(
    query_SHD: Tensor, key_SKLD: Tensor, value_SKLD: Tensor, ends_S: Tensor, scale: float, window: int
) -> Tensor:
    rows, heads, size = query_SHD.shape
    key_heads = key_SKLD.shape[1]
    assert query_SHD.stride(2) == key_SKLD.stride(3) == value_SKLD.stride(3) == 1
    parts = min(_MOST_PARTS, triton.next_power_of_2(max(1, _ENOUGH // (rows * key_heads))))
    out_SHD = query_SHD.new_empty(rows, heads, size)
    group, wide = heads // key_heads, max(16, triton.next_power_of_2(size))
    # Of each part: its sum of values, the largest score, and the sum of weights.
    kept = query_SHD.new_empty(rows * heads * parts * (size + 2) if parts > 1 else 1, dtype=torch.float32)
    with torch.cuda.device_of(query_SHD):
        _attend[(rows, key_heads, parts)](
            query_SHD, key_SKLD, value_SKLD, ends_S, out_SHD, kept, scale,
            query_SHD.stride(0), query_SHD.stride(1), key_SKLD.stride(0), key_SKLD.stride(1), key_SKLD.stride(2),
            value_SKLD.stride(0), value_SKLD.stride(1), value_SKLD.stride(2),
            HEADS=heads, GROUP=group, TILE=max(16, triton.next_power_of_2(group)), SIZE=size, WIDE=wide, KEYS=_KEYS,
            PARTS=parts, WINDOW=window,
        )  # fmt: skip
        if parts > 1:
            _put_together[(rows * heads,)](kept, out_SHD, SIZE=size, WIDE=wide, PARTS=parts)
    return out_SHD


@triton.jit
def _attend(
    query, key, value, ends, out, kept, scale,
    query_row, query_head, key_row, key_head, key_place, value_row, value_head, value_place,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    KEYS: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    end = tl.load(ends + row).to(tl.int32)
    begin = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
    share = tl.cdiv(tl.cdiv(end - begin, PARTS), KEYS) * KEYS
    first = begin + part * share
    last = tl.minimum(first + share, end)
    one, number = tl.arange(0, TILE), tl.arange(0, WIDE)
    mine = head * GROUP + one
    inside = (one < GROUP)[:, None] & (number < SIZE)[None, :]
    asked = tl.load(query + row * query_row + mine[:, None] * query_head + number[None, :], mask=inside, other=0.0)
    largest = tl.full((TILE,), -float("inf"), tl.float32)
    weights = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, WIDE), tl.float32)
    for at in range(first, last, KEYS):
        place = at + tl.arange(0, KEYS)
        there = place < last
        keys = tl.load(
            key + row * key_row + head * key_head + place[None, :] * key_place + number[:, None],
            mask=there[None, :] & (number < SIZE)[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(asked, keys, input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        each, before = tl.exp(scores - now[:, None]), tl.exp(largest - now)
        weights = weights * before + tl.sum(each, 1)
        values = tl.load(
            value + row * value_row + head * value_head + place[:, None] * value_place + number[None, :],
            mask=there[:, None] & (number < SIZE)[None, :], other=0.0,
        )  # fmt: skip
        sums = sums * before[:, None] + tl.dot(each.to(values.dtype), values, input_precision="ieee")
        largest = now
    if PARTS == 1:
        place_out = out + (row * HEADS + mine)[:, None] * SIZE + number[None, :]
        tl.store(place_out, (sums / weights[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        place_kept = kept + ((row * HEADS + mine) * PARTS + part) * (SIZE + 2)
        tl.store(place_kept[:, None] + number[None, :], sums, mask=inside)
        tl.store(place_kept + SIZE, largest, mask=one < GROUP)
        tl.store(place_kept + SIZE + 1, weights, mask=one < GROUP)


@triton.jit
def _put_together(kept, out, SIZE: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    which = tl.program_id(0).to(tl.int64)
    part, number = tl.arange(0, PARTS), tl.arange(0, WIDE)
    place = kept + (which * PARTS + part) * (SIZE + 2)
    largest, weights = tl.load(place + SIZE), tl.load(place + SIZE + 1)
    share = tl.exp(largest - tl.max(largest, 0))  # 0 of a part without positions
    sums = tl.load(place[:, None] + number[None, :], mask=(number < SIZE)[None, :], other=0.0)
    found = tl.sum(sums * share[:, None], 0) / tl.sum(weights * share, 0)
    tl.store(out + which * SIZE + number, found.to(out.dtype.element_ty), mask=number < SIZE)
