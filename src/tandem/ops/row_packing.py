"""Arrange sequences in rows and micro-batches by their lengths, for train/batch_packing.py and for plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Return how many ids all of them begin with."""
    return sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, zip(*sequences, strict=False)))


def first_fit(lengths: Sequence[int]) -> list[list[int]]:
    """Return rows, each as indices of `lengths`: first fit, the longest first, no row longer than the longest item.

    Sorting is stable: equal inputs give equal rows.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if not order:
        return []
    capacity, shortest = lengths[order[0]], lengths[order[-1]]
    rows: list[list[int]] = []
    used: list[int] = []
    open_rows: list[int] = []
    for index in order:
        row = next((row for row in open_rows if used[row] + lengths[index] <= capacity), None)
        if row is None:
            row = len(rows)
            rows.append([])
            used.append(0)
            open_rows.append(row)
        rows[row].append(index)
        used[row] += lengths[index]
        if used[row] + shortest > capacity:
            open_rows.remove(row)
    return rows


def micro_batches(widths: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Return micro-batches, each as indices of `widths`: rows of like length, at most `micro_tokens` positions with the
    padding included, one row at least."""
    parts: list[list[int]] = []
    width = 0
    for index in sorted(range(len(widths)), key=lambda index: -widths[index]):
        if not parts or width * (len(parts[-1]) + 1) > micro_tokens:
            parts.append([])
            width = widths[index]
        parts[-1].append(index)
    return parts
