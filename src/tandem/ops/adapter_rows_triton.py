# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# ruff: noqa: RUF005 - Triton has no starred tuples
"""The kernels of adapters for few tokens, as in decode steps: rows of one adapter are multiplied with its matrices, a
tile at a time.

Which rows a tile has is read from tensors, so a CUDA graph of a step goes on to fit when rows get other adapters. A
program reads its piece of a matrix once, holds it in registers, in float32, and multiplies it with row after row of its
tile: few rows have the same adapter, and a matrix unit would wait for a tile of them. Only imported if tensors are on a
GPU.

Shapes: R rows, T tiles, C slots of adapters, L layers with one input, E rank, I inputs and O outputs of a layer, P
parts of the inputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = 8  # of a tile
FEW_AHEAD, AHEAD = 2, 4  # rows whose numbers are read before the first is multiplied; few if adapters have few rows
NUMBERS = 2048  # of a matrix, in the registers of a warp: 64 in each thread
MOST_PARTS = 16  # a program of the second products adds up all parts of a row
WARPS = 1  # of a program, if these suffice: more of them must wait for each other to add up
MOST_LAYERS = 3  # with one input
_MOST_WARPS = 16
EARLY = True
"""A kernel begins to read matrices while the one before it ends."""


@dataclass(frozen=True, slots=True)
class Tiles:
    tiles_TN: Tensor
    """Of each tile: the adapter's slot, or -1 if it is empty; how many rows it has; the rows. The tensor stays, and is
    written for each order of adapters."""

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Tiles:
        return cls(torch.zeros(rows, 2 + ROWS, dtype=torch.int32, device=device))

    def set(self, slots: Sequence[int], most: int) -> None:
        """`slots`: of each row's adapter, or -1. `most`: tiles of the step."""
        rows_of = dict[int, list[int]]()
        for row, slot in enumerate(slots):
            if slot >= 0:
                rows_of.setdefault(slot, []).append(row)
        told = list[int]()
        for slot, rows in sorted(rows_of.items()):
            for at in range(0, len(rows), ROWS):
                tile = rows[at : at + ROWS]
                told += slot, len(tile), *tile, *[0] * (ROWS - len(tile))
        told += [-1, *[0] * (1 + ROWS)] * (most - len(told) // (2 + ROWS))
        # One copy, of memory that torch need not fill number by number: the GPU waits meanwhile.
        self.tiles_TN.view(-1)[: len(told)].copy_(torch.frombuffer(array("i", told), dtype=torch.int32))


def most_tiles(rows: int, capacity: int) -> int:
    return min(rows, rows // ROWS + min(rows, capacity))


def room(x_RI: Tensor, a_LCIE: Tensor) -> Tensor:
    """Return memory for first products, as [L, R, P, E]: P parts, whose sum they are."""
    layers, _, inputs, rank = a_LCIE.shape
    _, at_once = _sizes_narrow(inputs, rank)
    return x_RI.new_empty(layers, len(x_RI), _parts_of(inputs, at_once), rank, dtype=torch.float32)


def narrow(x_RI: Tensor, a_LCIE: Tensor, tiles: Tiles, into_LRPE: Tensor) -> None:
    """Compute the first products."""
    rows, inputs = x_RI.shape
    layers, capacity, _, rank = a_LCIE.shape
    assert x_RI.stride(1) == 1
    assert a_LCIE.is_contiguous()
    parts, (warps, at_once), ahead = into_LRPE.shape[2], _sizes_narrow(inputs, rank), _ahead(rank, rows, capacity)
    with torch.cuda.device_of(x_RI):
        _narrow[(most_tiles(rows, capacity), parts, layers)](
            x_RI, a_LCIE, into_LRPE, tiles.tiles_TN, rows, x_RI.stride(0),
            SLOTS=capacity, INPUTS=inputs, RANK=rank, WIDE=_wide(rank), PARTS=parts, AT_ONCE=at_once,
            TILE=ROWS, AHEAD=ahead, num_warps=warps, **_launched(x_RI.device),
        )  # fmt: skip


def add_wide(narrow_LRPE: Tensor, b_LCEO: Sequence[Tensor], outputs_LRO: Sequence[Tensor], tiles: Tiles) -> None:
    """Add the second products of layers with one input to their outputs, in place."""
    layers, rows, parts, rank = narrow_LRPE.shape
    assert layers == len(b_LCEO) == len(outputs_LRO) <= MOST_LAYERS
    assert all(each.is_contiguous() for each in (*b_LCEO, *outputs_LRO))
    capacity = len(b_LCEO[0])
    lacking, (warps, at_once), ahead = MOST_LAYERS - layers, _sizes_wide(rank), _ahead(rank, rows, capacity)
    sizes = [*(each.shape[2] for each in b_LCEO), *[0] * lacking]
    blocks = sum(_parts_of(size, at_once) for size in sizes)
    with torch.cuda.device_of(narrow_LRPE):
        _add_wide[(most_tiles(rows, capacity), blocks)](
            narrow_LRPE, *b_LCEO, *[b_LCEO[0]] * lacking, *outputs_LRO, *[outputs_LRO[0]] * lacking,
            tiles.tiles_TN, rows,
            OUTPUTS0=sizes[0], OUTPUTS1=sizes[1], OUTPUTS2=sizes[2], RANK=rank, WIDE=_wide(rank),
            PARTS=parts, PARTS_WIDE=_power_of_2(parts), AT_ONCE=at_once,
            TILE=ROWS, AHEAD=ahead, num_warps=warps, **_launched(narrow_LRPE.device),
        )  # fmt: skip


def _parts_of(number: int, size: int) -> int:
    return -(-number // size)


def _power_of_2(number: int) -> int:
    """Return the next one. Triton's own function takes longer than a launch should."""
    return 1 << (number - 1).bit_length()


def _wide(rank: int) -> int:
    return max(4, _power_of_2(rank))


def _ahead(rank: int, rows: int, capacity: int) -> int:
    return max(1, (FEW_AHEAD if rows <= 4 * capacity else AHEAD) * 16 // max(16, _wide(rank)))


def _sizes_narrow(inputs: int, rank: int) -> tuple[int, int]:
    """Return the warps of a program, and its inputs."""
    of_a_warp = max(1, NUMBERS // _wide(rank))
    needed = _power_of_2(_parts_of(_parts_of(inputs, of_a_warp), MOST_PARTS))
    warps = min(max(needed, WARPS), _MOST_WARPS)
    return warps, warps * of_a_warp


def _sizes_wide(rank: int) -> tuple[int, int]:
    """Return the warps of a program, and its outputs."""
    wide = _wide(rank)
    warps = min(max(WARPS, 128 * wide // NUMBERS), _MOST_WARPS)  # a warp reads 128 neighbours: 16 bytes a thread
    return warps, max(128, warps * NUMBERS // wide)


def _launched(device: torch.device) -> dict[str, Any]:
    return {"EARLY": True, "launch_pdl": True} if EARLY and _can_be_early(device) else {"EARLY": False}


@cache
def _can_be_early(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _narrow(
    x, a, into, tiles, num_rows, x_row,
    SLOTS: tl.constexpr, INPUTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr, AT_ONCE: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile, part, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if EARLY:
        gdc_launch_dependents()
    mine = tiles + tile * (2 + TILE)
    slot, count = tl.load(mine), tl.load(mine + 1)
    if slot >= 0:
        number, at = tl.arange(0, WIDE), part * AT_ONCE + tl.arange(0, AT_ONCE)
        weights = tl.load(
            a + (layer * SLOTS + slot).to(tl.int64) * (INPUTS * RANK) + at[:, None] * RANK + number[None, :],
            mask=(at < INPUTS)[:, None] & (number < RANK)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if EARLY:
            gdc_wait()
        place = into + layer * num_rows * (PARTS * RANK) + part * RANK + number
        for first in range(0, count, AHEAD):
            places, read = (), ()
            for later in tl.static_range(AHEAD):
                there = first + later < count
                row = tl.load(mine + 2 + first + later, mask=there, other=0)
                values = tl.load(x + row.to(tl.int64) * x_row + at, mask=(at < INPUTS) & there, other=0.0)
                places, read = places + (place + row * (PARTS * RANK),), read + (values,)
            for later in tl.static_range(AHEAD):
                found = tl.sum(read[later].to(tl.float32)[:, None] * weights, 0)
                there = first + later < count
                tl.store(places[later], found, mask=(number < RANK) & there)
    elif EARLY:
        gdc_wait()


@triton.jit(do_not_specialize=["num_rows"])
def _add_wide(
    narrow, b0, b1, b2, output0, output1, output2, tiles, num_rows,
    OUTPUTS0: tl.constexpr, OUTPUTS1: tl.constexpr, OUTPUTS2: tl.constexpr, RANK: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr, PARTS_WIDE: tl.constexpr, AT_ONCE: tl.constexpr, TILE: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    blocks0: tl.constexpr = (OUTPUTS0 + AT_ONCE - 1) // AT_ONCE
    blocks1: tl.constexpr = (OUTPUTS1 + AT_ONCE - 1) // AT_ONCE
    mine = tiles + tile * (2 + TILE)
    slot, count = tl.load(mine), tl.load(mine + 1)
    if slot >= 0:
        if block < blocks0:
            _add_block(
                narrow, b0, output0, mine + 2, slot, count, block, 0,
                OUTPUTS0, RANK, WIDE, PARTS, PARTS_WIDE, AT_ONCE, AHEAD, EARLY,
            )  # fmt: skip
        elif block < blocks0 + blocks1:
            _add_block(
                narrow, b1, output1, mine + 2, slot, count, block - blocks0, num_rows,
                OUTPUTS1, RANK, WIDE, PARTS, PARTS_WIDE, AT_ONCE, AHEAD, EARLY,
            )  # fmt: skip
        else:
            _add_block(
                narrow, b2, output2, mine + 2, slot, count, block - blocks0 - blocks1, 2 * num_rows,
                OUTPUTS2, RANK, WIDE, PARTS, PARTS_WIDE, AT_ONCE, AHEAD, EARLY,
            )  # fmt: skip
    elif EARLY:
        gdc_wait()


@triton.jit
def _add_block(
    narrow, b, output, rows, slot, count, block, before_layer,
    OUTPUTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
    PARTS_WIDE: tl.constexpr, AT_ONCE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    number, at, part = tl.arange(0, WIDE), block * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, PARTS_WIDE)
    weights = tl.load(
        b + slot.to(tl.int64) * (RANK * OUTPUTS) + number[:, None] * OUTPUTS + at[None, :],
        mask=(number < RANK)[:, None] & (at < OUTPUTS)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    if EARLY:
        gdc_wait()
    places = narrow + before_layer * (PARTS * RANK) + part[:, None] * RANK + number[None, :]
    are_there = (part < PARTS)[:, None] & (number < RANK)[None, :]
    for first in range(0, count, AHEAD):
        intos, befores, narrows = (), (), ()
        for later in tl.static_range(AHEAD):
            there = first + later < count
            row = tl.load(rows + first + later, mask=there, other=0)
            into = output + row.to(tl.int64) * OUTPUTS + at
            before = tl.load(into, mask=(at < OUTPUTS) & there, other=0.0)
            parts = tl.load(places + row * (PARTS * RANK), mask=are_there & there, other=0.0)
            intos, befores, narrows = intos + (into,), befores + (before,), narrows + (parts,)
        for later in tl.static_range(AHEAD):
            added = tl.sum(tl.sum(narrows[later], 0)[:, None] * weights, 0)
            found = befores[later].to(tl.float32) + added
            there = first + later < count
            tl.store(intos[later], found.to(output.dtype.element_ty), mask=(at < OUTPUTS) & there)
