# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
"""The kernels of adapters in decode steps: rows of one adapter are multiplied with its matrices, a tile at a time.

Which rows a tile has is read from tensors, so a CUDA graph of a step goes on to fit when rows get other adapters. The
matrices are read once for a tile of 16 rows, in float32, whatever the model computes in. Only imported if tensors are
on a GPU.

Shapes: R rows, T tiles, C slots of adapters, L layers with one input, E rank, I inputs and O outputs of a layer, P
parts of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a tile: the least that a matrix unit takes
_INPUTS, _OUTPUTS = 128, 256  # at a time
_ENOUGH, _MOST_PARTS = 1056, 16  # programs that keep a GPU busy: eight on each multiprocessor, each of them short


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tensors stay, and are written for each order of adapters."""

    order_R: Tensor
    """Rows with an adapter, those of one adapter together."""
    tiles_3T: Tensor
    """Of each tile: the adapter's slot, or -1 if it is empty; its begin and end in `order_R`."""

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Tiles:
        order_R, *tiles = torch.zeros(4, rows, dtype=torch.int32, device=device)
        return cls(order_R, torch.stack(tiles))

    def set(self, slots: Sequence[int], most: int) -> None:
        """`slots`: of each row's adapter, or -1. `most`: tiles of the step."""
        order = sorted((row for row, slot in enumerate(slots) if slot >= 0), key=lambda row: slots[row])
        tiles, first = list[tuple[int, int, int]](), 0
        for end, row in enumerate(order, 1):
            if end == len(order) or slots[order[end]] != slots[row]:
                tiles += [(slots[row], begin, min(begin + ROWS, end)) for begin in range(first, end, ROWS)]
                first = end
        tiles += [(-1, 0, 0)] * (most - len(tiles))
        self.order_R[: len(order)] = torch.tensor(order, dtype=torch.int32).to(self.order_R.device)
        self.tiles_3T[:, :most] = torch.tensor(tiles, dtype=torch.int32).T.to(self.order_R.device)


def most_tiles(rows: int, capacity: int) -> int:
    return min(rows, rows // ROWS + min(rows, capacity))


def narrow(x_RI: Tensor, a_LCIE: Tensor, tiles: Tiles) -> Tensor:
    """Return the first products as [P, L, R, E]: P parts, whose sum they are."""
    rows, inputs = x_RI.shape
    layers, capacity, _, rank = a_LCIE.shape
    count = most_tiles(rows, capacity)
    assert x_RI.stride(1) == 1
    assert a_LCIE.is_contiguous()
    wanted = triton.next_power_of_2(max(1, _ENOUGH // (count * layers)))
    parts = min(_MOST_PARTS, wanted, triton.cdiv(inputs, _INPUTS))
    into_PLRE = x_RI.new_empty(parts, layers, rows, rank, dtype=torch.float32)
    with torch.cuda.device_of(x_RI):
        _narrow[(count, layers, parts)](
            x_RI, a_LCIE, into_PLRE, tiles.order_R, *tiles.tiles_3T, x_RI.stride(0),
            NUM_ROWS=rows, SLOTS=capacity, INPUTS=inputs, RANK=rank, WIDE=max(16, triton.next_power_of_2(rank)),
            SHARE=triton.cdiv(triton.cdiv(inputs, parts), _INPUTS) * _INPUTS, AT_ONCE=_INPUTS, LAYERS=layers, TILE=ROWS,
        )  # fmt: skip
    return into_PLRE


def add_wide(narrow_PLRE: Tensor, at: int, b_CEO: Tensor, output_RO: Tensor, tiles: Tiles) -> None:
    """Add the second products of the layer `at` to its output, in place."""
    parts, layers, rows, rank = narrow_PLRE.shape
    capacity, _, outputs = b_CEO.shape
    assert output_RO.stride(1) == 1
    assert b_CEO.is_contiguous()
    with torch.cuda.device_of(output_RO):
        _add_wide[(most_tiles(rows, capacity), triton.cdiv(outputs, _OUTPUTS))](
            narrow_PLRE, b_CEO, output_RO, tiles.order_R, *tiles.tiles_3T,
            output_RO.stride(0), at, NUM_ROWS=rows, OUTPUTS=outputs, RANK=rank,
            WIDE=max(16, triton.next_power_of_2(rank)), PARTS=parts, AT_ONCE=_OUTPUTS, LAYERS=layers, TILE=ROWS,
        )  # fmt: skip


@triton.jit
def _narrow(
    x, a, into, order, slots, begins, ends, x_row,
    NUM_ROWS: tl.constexpr, SLOTS: tl.constexpr, INPUTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
    SHARE: tl.constexpr, AT_ONCE: tl.constexpr, LAYERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, layer, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + tile)
    if slot >= 0:
        place = tl.load(begins + tile) + tl.arange(0, TILE)
        there = place < tl.load(ends + tile)
        row = tl.load(order + place, mask=there, other=0).to(tl.int64)
        number, step = tl.arange(0, WIDE), tl.arange(0, AT_ONCE)
        matrix = a + (layer * SLOTS + slot).to(tl.int64) * (INPUTS * RANK)
        sums = tl.zeros((TILE, WIDE), tl.float32)
        for begin in range(0, SHARE, AT_ONCE):
            at = part * SHARE + begin + step
            values = tl.load(
                x + row[:, None] * x_row + at[None, :], mask=there[:, None] & (at < INPUTS)[None, :], other=0.0
            )
            weights = tl.load(
                matrix + at[:, None] * RANK + number[None, :],
                mask=(at < INPUTS)[:, None] & (number < RANK)[None, :], other=0.0,
            )  # fmt: skip
            sums += tl.dot(values.to(tl.float32), weights, input_precision="ieee")
        place_into = into + ((part * LAYERS + layer) * NUM_ROWS + row[:, None]) * RANK + number[None, :]
        tl.store(place_into, sums, mask=there[:, None] & (number < RANK)[None, :])


@triton.jit
def _add_wide(
    narrow, b, output, order, slots, begins, ends, output_row, layer,
    NUM_ROWS: tl.constexpr, OUTPUTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr, LAYERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + tile)
    if slot >= 0:
        place = tl.load(begins + tile) + tl.arange(0, TILE)
        there = place < tl.load(ends + tile)
        row = tl.load(order + place, mask=there, other=0).to(tl.int64)
        number, at = tl.arange(0, WIDE), block * AT_ONCE + tl.arange(0, AT_ONCE)
        sums = tl.zeros((TILE, WIDE), tl.float32)
        for part in tl.static_range(PARTS):
            sums += tl.load(
                narrow + ((part * LAYERS + layer) * NUM_ROWS + row[:, None]) * RANK + number[None, :],
                mask=there[:, None] & (number < RANK)[None, :], other=0.0,
            )  # fmt: skip
        weights = tl.load(
            b + slot.to(tl.int64) * (RANK * OUTPUTS) + number[:, None] * OUTPUTS + at[None, :],
            mask=(number < RANK)[:, None] & (at < OUTPUTS)[None, :], other=0.0,
        )  # fmt: skip
        into = output + row[:, None] * output_row + at[None, :]
        inside = there[:, None] & (at < OUTPUTS)[None, :]
        before = tl.load(into, mask=inside, other=0.0).to(tl.float32)
        found = before + tl.dot(sums, weights, input_precision="ieee")
        tl.store(into, found.to(output.dtype.element_ty), mask=inside)
