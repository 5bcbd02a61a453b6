"""Rectangles of tensors: which rows a rank holds, and what two holders have in common.

Rows are the first dimension, columns all others together; a vector is one column. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


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


def box_of_rank(shape: Sequence[int], rank: int, num_ranks: int) -> Box:
    """Return the rows of a tensor that a rank holds, all columns."""
    rows, cols = rows_and_cols(shape)
    top, bottom = rows_of(rows, rank, num_ranks)
    return Box(top, bottom, 0, cols)
