"""Where a tensor's integers lie in memory, and the weights that the digest multiplies them by.

Shapes: R rows, C columns.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DigestMatrix(NamedTuple):
    """The integers to sum, read as unsigned, and where their weights begin."""

    integers_RC: Tensor
    row_seed: int
    col_seed: int
    row_start: int
    col_start: int


class Plain(NamedTuple):
    """The same for a tensor whose rows are contiguous in memory, described without creating views."""

    place: int
    width: int
    num_rows: int
    num_cols: int
    pitch: int
    row_seed: int
    col_seed: int
    row_start: int
    col_start: int
