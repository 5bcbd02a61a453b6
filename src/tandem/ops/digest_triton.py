# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
"""Compute the sums of ops/digest.py over any number of matrices on a GPU; each byte is read once, in place.

There is one launch per element width and tile width. A program sums one tile of a matrix; a table says which. This
module is imported only if tensors are on a GPU.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.ops.batched_launches import Replay
from tandem.ops.digest_layout import DigestMatrix, Plain

_LANES = 1024  # elements at a time, of one row or of many
_COLS = (16, 64, 256, _LANES)  # columns of a tile; half of an adapter's tensors are as wide as its rank
NO_LIMIT = 2**62


class Table:
    """The bytes to sum and their weights; made once, for any number of sums."""

    def __init__(
        self, matrices: Sequence[DigestMatrix | Plain], device: torch.device, limits: Sequence[int] | None = None
    ) -> None:
        """All tensors must be on `device`, and exist until the kernel has read them. `limits`, one per matrix: elements
        whose bits, without the top bit, are at or above the limit are not finite."""
        self.held = list[Tensor]()  # kept until they were read, because some are copies
        self._checks, self.num, self.device = limits is not None, len(matrices), device
        entries: defaultdict[tuple[int, bool, int], list[Sequence[int]]] = defaultdict(list)
        for index, matrix in enumerate(matrices):
            if len(matrix) == 9:
                place, width, rows, cols, pitch, *weights = matrix
            else:
                integers_RC, *weights = _lengthwise(matrix)
                self.held.append(integers_RC)
                (rows, cols), place, width = integers_RC.shape, integers_RC.data_ptr(), integers_RC.element_size()
                pitch = integers_RC.stride(0) if rows > 1 else 0
            aligned = ((cols | pitch) * width | place) % 16 == 0  # of each row, to read 16 bytes at a time
            limit = limits[index] if limits is not None else NO_LIMIT
            across = next((each for each in _COLS if cols <= each), _LANES)
            entries[width, aligned, across].append((place, rows, cols, pitch, *weights, index, limit))
        table, counts = array("q"), array("q")
        self._launches = list[tuple[int, int, int, bool, int]]()
        num_tiles = 0
        for (width, aligned, across), group in entries.items():
            first = num_tiles
            for entry in group:
                table.extend((*entry, num_tiles))
                counts.append(-(-entry[1] // _rows(across)) * -(-entry[2] // across))
                num_tiles += counts[-1]
            self._launches.append((first, num_tiles, width, aligned, across))
        owners = torch.repeat_interleave(torch.frombuffer(counts, dtype=torch.int64), output_size=num_tiles)
        told = torch.cat((torch.frombuffer(table, dtype=torch.int64), owners))
        # From pinned memory: otherwise the copy would wait for earlier kernels.
        pinned = told.pin_memory() if device.type == "cuda" else told
        self._told, self._num_entries = pinned.to(device, non_blocking=True), len(table)

    def launch(self) -> Tensor:
        """Return in row 0 the sums, modulo 2**64, as signed numbers; in row 1 a 1 if an element is not finite, else
        0."""
        out = torch.zeros((2, self.num), dtype=torch.int64, device=self.device)
        self.add_to(out)
        return out

    def add_to(self, out: Tensor) -> None:
        told, num = self._told, self.num
        with torch.cuda.device_of(told):
            for first, end, width, aligned, across in self._launches:
                _add_up[(end - first,)](
                    told, told[self._num_entries :], out, num, first,
                    WIDTH=width, ALIGNED=aligned, CHECK=self._checks, ROWS=_rows(across), COLS=across, LANES=_LANES,
                    num_warps=2,
                )  # fmt: skip


class Again:
    """Computes the sums of one table repeatedly, for one caller at a time."""

    def __init__(self, table: Table, *, alone: bool) -> None:
        """`alone`: see ops/batched_launches.py."""
        self._table = table
        self._out = torch.empty((2, table.num), dtype=torch.int64, device=table.device)
        self._here = torch.empty(self._out.shape, dtype=torch.int64, pin_memory=True)
        self._replay = Replay(self._launch, {self._out.device}, "digests", alone=alone)

    def sums(self) -> list[list[int]]:
        """Return the sums as `Table.launch` does, after waiting for them."""
        self._replay.run()
        torch.cuda.current_stream(self._out.device).synchronize()
        return self._here.tolist()

    def _launch(self) -> None:
        self._out.zero_()
        self._table.add_to(self._out)
        self._here.copy_(self._out, non_blocking=True)


def _lengthwise(matrix: DigestMatrix) -> DigestMatrix:
    """Return the matrix with neighbours in memory as neighbours in a row; transpose it if needed."""
    integers_RC, row_seed, col_seed, row_start, col_start = matrix
    if 1 not in integers_RC.stride():
        integers_RC = integers_RC.contiguous()
    pitch, step = integers_RC.stride()
    if step != 1 or (integers_RC.shape[1] == 1 and pitch == 1):
        return type(matrix)(integers_RC.t(), col_seed, row_seed, col_start, row_start)
    return type(matrix)(integers_RC, row_seed, col_seed, row_start, col_start)


def _rows(cols: int) -> int:
    """Return the rows of a tile of this width."""
    return 64 if cols == _LANES else 16 * _LANES // cols


@triton.jit
def _weight(seed, at):
    z = at.to(tl.uint64) * 0x9E3779B97F4A7C15 + seed.to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit(do_not_specialize=["num", "first"])
def _add_up(
    table, owners, out, num, first,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, CHECK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    tile = first + tl.program_id(0)
    mine = table + tl.load(owners + tile) * 11  # numbers of an entry
    place, rows, cols, pitch = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2), tl.load(mine + 3)
    row_seed, col_seed = tl.load(mine + 4), tl.load(mine + 5)
    row_start, col_start = tl.load(mine + 6), tl.load(mine + 7)
    index, first_tile = tl.load(mine + 8), tl.load(mine + 10)
    if WIDTH == 1:
        start = place.to(tl.pointer_type(tl.uint8))
    elif WIDTH == 2:
        start = place.to(tl.pointer_type(tl.uint16))
    else:
        start = place.to(tl.pointer_type(tl.uint32))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        cols = tl.multiple_of(cols, 16 // WIDTH)
        pitch = tl.multiple_of(pitch, 16 // WIDTH)
    across = tl.cdiv(cols, COLS)
    top = (tile - first_tile) // across * ROWS
    lane = tl.arange(0, LANES)
    at = (tile - first_tile) % across * COLS + lane % COLS
    inside = at < cols
    # Multiply by the two 32-bit halves of a weight separately, instead of one multiplication of 64 bits.
    low = tl.zeros([LANES], dtype=tl.uint64)
    high = tl.zeros([LANES], dtype=tl.uint32)
    largest = tl.zeros([LANES], dtype=tl.uint32)
    for first_row in tl.range(top, tl.minimum(top + ROWS, rows), LANES // COLS, loop_unroll_factor=4):
        if COLS == LANES:
            row, there = first_row, inside
        else:
            row = first_row + lane // COLS
            there = inside & (row < rows)
        weight = _weight(row_seed, row_start + row)
        value = tl.load(start + row * pitch + at, mask=there, other=0).to(tl.uint32)
        low += value.to(tl.uint64) * (weight & 0xFFFFFFFF)
        high += value * (weight >> 32).to(tl.uint32)
        if CHECK:
            largest = tl.maximum(largest, value & (2 ** (8 * WIDTH - 1) - 1))
    total = (low + (high.to(tl.uint64) << 32)) * _weight(col_seed, col_start + at)
    tl.atomic_add(out + index, tl.sum(total).to(tl.int64))
    if CHECK:
        odd = tl.max(largest).to(tl.int64) >= tl.load(mine + 9)
        tl.store(out + num + index, 1, mask=odd)
