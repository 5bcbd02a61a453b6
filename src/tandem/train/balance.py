"""Which rank computes which micro-batch. ops/row_packing.py makes as many as ranks can share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tandem.ops.row_packing import busiest

T = TypeVar("T")


def leaves(micro: Sequence[T], shares: int, *, by_step: bool) -> list[list[T]]:
    """Return what each leaf of the tree in gradient_tree.py is made of: one micro-batch, or with `by_step` all of one
    share. They are sorted by cost, and dealt there and back, so that shares cost about the same."""
    if not by_step:
        return [[each] for each in micro]
    found: list[list[T]] = [[] for _ in range(min(shares, len(micro)))]
    for start in range(0, len(micro), shares):
        order = range(len(found)) if start // shares % 2 == 0 else reversed(range(len(found)))
        for share, each in zip(order, micro[start : start + shares], strict=False):
            found[share].append(each)
    return found


def dealt(leaves: Sequence[T], ranks: int) -> list[list[T | None]]:
    """Return rounds: leaf i is computed in round i // ranks by rank i % ranks. Those of a round cost about the same.
    None: nothing is left for this rank."""
    rounds: list[list[T | None]] = []
    for start in range(0, len(leaves), ranks):
        these: list[T | None] = list(leaves[start : start + ranks])
        rounds.append(these + [None] * (ranks - len(these)))
    return rounds


def widths(rounds: Sequence[Sequence[Sequence[T] | None]]) -> list[int]:
    """Return how many micro-batches the longest leaf of each round has."""
    return [max(len(leaf) for leaf in each if leaf) for each in rounds]


def of_rank(rounds: Sequence[Sequence[Sequence[T] | None]], rank: int) -> list[T | None]:
    """Return one rank's micro-batches, as many in each round as the longest leaf has. Where a leaf is shorter, None
    comes first: what a rank then computes for the sake of the others is forgotten before there is a sum."""
    found: list[T | None] = []
    for each, width in zip(rounds, widths(rounds), strict=True):
        leaf = each[rank] or ()
        found += [None] * (width - len(leaf)) + [*leaf]
    return found


def imbalance(costs: Sequence[int], ranks: int) -> float:
    """How much longer all ranks take, compared with a perfect split of the same work. 0: not at all. `costs`: of the
    leaves."""
    total = sum(costs)
    return busiest(costs, ranks) * ranks / total - 1.0 if total else 0.0
