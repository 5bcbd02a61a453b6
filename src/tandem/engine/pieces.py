"""The fingerprints of whole tensors, from what each worker of an engine says of the pieces that it serves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem.errors import SyncError
from tandem.ops.digest import combine, text

Range = tuple[int, int, int, int]
"""Rows from and to, columns from and to."""


def whole(pieces: Iterable[Sequence[Any]], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """`pieces`: name, row_start, row_stop, col_start, col_stop, digest. Together they must hold every element of every
    tensor in `shapes`; where several workers hold the same piece, they must hold the same."""
    found: defaultdict[str, dict[Range, int]] = defaultdict(dict)
    for name, *numbers in pieces:
        place, number = tuple(numbers[:4]), int(numbers[4])
        if found[name].setdefault(place, number) != number:
            raise SyncError(f"engine: its workers serve different weights as '{name}', in rows and columns {place}")
    if odd := sorted(found.keys() ^ shapes.keys()):
        raise SyncError(f"engine: '{odd[0]}' is served by no worker, or by one that should not ({len(odd)} tensors)")
    for name, parts in found.items():
        _check_tiling(name, parts, shapes[name])
    digests = combine((name, number) for name, parts in found.items() for number in parts.values())
    return {name: text(number) for name, number in digests.items()}


def _check_tiling(name: str, parts: Iterable[Range], shape: Sequence[int]) -> None:
    rows, cols = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    placed = sorted(parts)
    area = sum((bottom - top) * (right - left) for top, bottom, left, right in placed)
    overlap = any(
        a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3] for i, a in enumerate(placed) for b in placed[:i]
    )
    if area != rows * cols or overlap:
        raise SyncError(f"engine: its workers serve {area} elements of '{name}', which has {rows * cols}: {placed}")
