"""Rectangles of tensors: which rows a rank holds, and what two holders have in common.

Rows are the first dimension, columns all others together; a vector is one column. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias


class Box(NamedTuple):
    """Rows from and to, columns from and to."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def num_elements(self) -> int:
        return max(0, self.bottom - self.top) * max(0, self.right - self.left)

    def overlap(self, other: Box) -> Box | None:
        """Return what both contain; None if that is nothing."""
        both = Box(
            max(self.top, other.top),
            min(self.bottom, other.bottom),
            max(self.left, other.left),
            min(self.right, other.right),
        )
        return both if both.num_elements else None


def rows_and_cols(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape as a matrix; a scalar is one element."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def rows_of(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the first row that a rank holds and the one behind its last, as FSDP2 cuts: equal runs of rows,
    rounded up, so that the last ranks may hold fewer or none."""
    run = -(-num_rows // num_ranks)
    return min(rank * run, num_rows), min((rank + 1) * run, num_rows)


Cut: TypeAlias = Literal["rows", "cols", "whole"]
"""What each rank holds of a tensor: its rows, its columns, or all of it."""


def box_of_rank(shape: Sequence[int], rank: int, num_ranks: int, cut: Cut = "rows") -> Box:
    """Return what a rank holds of a tensor."""
    rows, cols = rows_and_cols(shape)
    if cut == "whole":
        return Box(0, rows, 0, cols)
    if cut == "cols":
        return Box(0, rows, *rows_of(cols, rank, num_ranks))
    return Box(*rows_of(rows, rank, num_ranks), 0, cols)


BY_COLUMNS = ("o_proj", "down_proj")
"""Linear layers whose weights tensor-parallel engines cut by columns."""
_NORM_BLOCKS = 8


def numbers_a_norm(name: str, shape: Sequence[int]) -> int:
    """Return how many numbers of a row are squared and added before the sum goes on without rounding, so that norms
    depend on no cut. A row of a matrix that engines cut by columns is in eight blocks, which no cut in 2, 4 or 8 parts
    divides. `shape`: of the whole tensor."""
    cols = rows_and_cols(shape)[1]
    return (
        cols // _NORM_BLOCKS if name.removesuffix(".weight").endswith(BY_COLUMNS) and cols % _NORM_BLOCKS == 0 else cols
    )
