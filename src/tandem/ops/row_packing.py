"""Arrange sequences in rows and micro-batches by their lengths, for train/batch_packing.py and for plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TypeVar

T = TypeVar("T")

_SIX_HIDDEN = 6 * 2048
"""A token costs 24 H^2 floating-point operations a layer, and 4 H more for each token that it sees: as many at 6 H
tokens. Of a model of some billion weights; the split of work needs no better."""


def cost(num_rows: int, width: int) -> int:
    """What a micro-batch costs to compute, in no unit."""
    return num_rows * width * (_SIX_HIDDEN + width)


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


def micro_batches(widths: Sequence[int], micro_tokens: int, most_padding: float = math.inf) -> list[list[int]]:
    """Return micro-batches, each as indices of `widths`: rows of like length, at most `micro_tokens` positions with the
    padding included, of which at most `most_padding` are padding; one row at least."""
    parts: list[list[int]] = []
    width = padding = 0
    for index in sorted(range(len(widths)), key=lambda index: -widths[index]):
        padding += width - widths[index]
        if not parts or width * (len(parts[-1]) + 1) > micro_tokens or padding > most_padding:
            parts.append([])
            width, padding = widths[index], 0
        parts[-1].append(index)
    return parts


def in_shares(
    rows: Sequence[Sequence[T]], length_of: Callable[[T], int], micro_tokens: int, at_least: int, multiple: int
) -> tuple[list[Sequence[T]], list[list[int]]]:
    """Return rows of items, and micro-batches as indices of them, as many as a multiple of `multiple`. Where there are
    fewer rows than micro-batches, rows with several items are cut in two.

    What a micro-batch holds depends on the batch and on `multiple` (parallel.shares), never on the number of ranks: so
    other numbers of ranks compute the same micro-batches, and add the same gradients.
    """
    found = list(rows)
    wanted = -(-at_least // multiple) * multiple
    while len(found) < wanted and any(len(row) > 1 for row in found):
        several = (index for index, row in enumerate(found) if len(row) > 1)
        index = max(several, key=lambda each: sum(map(length_of, found[each])))
        row = found[index]
        found[index : index + 1] = [row[: len(row) // 2], row[len(row) // 2 :]]
    widths = [sum(map(length_of, row)) for row in found]
    return found, in_multiples(widths, micro_tokens, at_least, multiple)


def in_multiples(widths: Sequence[int], micro_tokens: int, at_least: int, multiple: int) -> list[list[int]]:
    """Return micro-batches as indices of `widths`, the costliest first: as many as a multiple of `multiple`, at least
    `at_least`, all of like cost, each at most `micro_tokens` positions or one row. Fewer where the rows are too few."""
    order = sorted(range(len(widths)), key=lambda index: -widths[index])
    wanted = min(-(-max(1, at_least) // multiple) * multiple, len(order))
    sorted_widths = [widths[index] for index in order]
    while True:
        low, high = 1, cost(len(order), max(sorted_widths, default=1))
        while low < high:  # the smallest limit with which they are few enough
            middle = (low + high) // 2
            if len(_filled(sorted_widths, micro_tokens, middle)) <= wanted:
                high = middle
            else:
                low = middle + 1
        parts = _filled(sorted_widths, micro_tokens, high)
        if len(parts) <= wanted or wanted == len(order):
            break
        wanted = min(-(-len(parts) // multiple) * multiple, len(order))  # micro_tokens asks for more
    while len(parts) < wanted:
        index = max(
            (i for i, part in enumerate(parts) if len(part) > 1),
            key=lambda i: cost(len(parts[i]), sorted_widths[parts[i][0]]),
        )
        part = parts[index]
        parts[index : index + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    parts.sort(key=lambda part: -cost(len(part), sorted_widths[part[0]]))
    return [[order[place] for place in part] for part in parts]


def _filled(widths: Sequence[int], micro_tokens: int, limit: int) -> list[list[int]]:
    """Runs of `widths`, which fall, each as long as both limits allow."""
    parts: list[list[int]] = []
    for place, width in enumerate(widths):
        first = widths[parts[-1][0]] if parts else width
        count = len(parts[-1]) + 1 if parts else 1
        if not parts or first * count > micro_tokens or cost(count, first) > limit:
            parts.append([place])
        else:
            parts[-1].append(place)
    return parts


def busiest(costs: Sequence[float], ranks: int) -> float:
    """Return what takes all ranks as long as these micro-batches: the largest of each round."""
    return sum(max(costs[start : start + ranks]) for start in range(0, len(costs), ranks))
