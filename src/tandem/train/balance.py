"""Which rank computes which micro-batch. ops/row_packing.py makes as many as ranks can share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tandem.ops.row_packing import busiest

T = TypeVar("T")


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
    return busiest(costs, ranks) * ranks / total - 1.0 if total else 0.0
