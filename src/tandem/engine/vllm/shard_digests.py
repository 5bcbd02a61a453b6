"""The fingerprints of whole tensors, from what each worker of an engine says of the pieces that it serves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem.errors import SyncError
from tandem.ops.digest import combine, text, texts

Range = tuple[int, int, int, int]
"""Rows from and to, columns from and to."""


class Tiling:
    """Which pieces of which tensors workers serve: looked at once, for as often as they are digested."""

    def __init__(self, pieces: Iterable[Sequence[Any]], shapes: Mapping[str, Sequence[int]]) -> None:
        """`pieces`: name, row_start, row_stop, col_start, col_stop, and what may follow. Together they must hold every
        element of every tensor in `shapes`."""
        self._pieces = [(str(name), tuple(numbers[:4])) for name, *numbers in pieces]
        found: defaultdict[str, set[Range]] = defaultdict(set)
        for name, place in self._pieces:
            found[name].add(place)
        if odd := sorted(found.keys() ^ shapes.keys()):
            raise SyncError(
                f"engine: '{odd[0]}' is served by no worker, or by one that should not ({len(odd)} tensors)"
            )
        for name, parts in found.items():
            _check_tiling(name, parts, shapes[name])
        self._one_each = len(found) == len(self._pieces)

    def fingerprints(self, digests: Iterable[str]) -> dict[str, str]:
        """`digests`: of each piece. Where several workers hold the same piece, they must hold the same."""
        if self._one_each:
            return {name: digest for (name, _), digest in zip(self._pieces, digests, strict=True)}
        found: dict[tuple[str, Range], str] = {}
        for piece, digest in zip(self._pieces, digests, strict=True):
            if found.setdefault(piece, digest) != digest:
                name, place = piece
                raise SyncError(f"engine: its workers serve different weights as '{name}', in rows and columns {place}")
        whole = combine((name, int(digest, 16)) for (name, _), digest in found.items())
        return {name: text(number) for name, number in whole.items()}


def whole(pieces: Sequence[Sequence[Any]], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """`pieces`: as above, and then the digest."""
    return Tiling(pieces, shapes).fingerprints(digests_of(pieces))


def digests_of(pieces: Sequence[Sequence[Any]]) -> list[str]:
    return texts(int(piece[5]) for piece in pieces)


def _check_tiling(name: str, parts: Iterable[Range], shape: Sequence[int]) -> None:
    rows, cols = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    placed = sorted(parts)
    area = sum((bottom - top) * (right - left) for top, bottom, left, right in placed)
    overlap = any(
        a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3] for i, a in enumerate(placed) for b in placed[:i]
    )
    if area != rows * cols or overlap:
        raise SyncError(f"engine: its workers serve {area} elements of '{name}', which has {rows * cols}: {placed}")
