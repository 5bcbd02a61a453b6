"""Micro-batches that several ranks can share: how many, of which rows, and which rank computes which.

What a micro-batch holds depends on the batch and on `multiple` (parallel.shares), never on the number of ranks: so
other numbers of ranks compute the same micro-batches, and add the same gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_SIX_HIDDEN = 6 * 2048
"""A token costs 24 H^2 floating-point operations a layer, and 4 H more for each token that it sees: as many at 6 H
tokens. Of a model of some billion weights; the split of work needs no better."""


def cost(num_rows: int, width: int) -> int:
    """What a micro-batch costs to compute, in no unit."""
    return num_rows * width * (_SIX_HIDDEN + width)


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


def dealt(micro: Sequence[T], ranks: int) -> list[list[T | None]]:
    """Return rounds: micro-batch i is computed in round i // ranks by rank i % ranks. Those of a round cost about the
    same, as they are sorted by cost. None: nothing is left for this rank."""
    rounds: list[list[T | None]] = []
    for start in range(0, len(micro), ranks):
        these: list[T | None] = list(micro[start : start + ranks])
        rounds.append(these + [None] * (ranks - len(these)))
    return rounds


def imbalance(costs: Sequence[int], ranks: int) -> float:
    """How much longer all ranks take, compared with a perfect split of the same work. 0: not at all."""
    total = sum(costs)
    slowest = sum(max(costs[start : start + ranks]) for start in range(0, len(costs), ranks))
    return slowest * ranks / total - 1.0 if total else 0.0
