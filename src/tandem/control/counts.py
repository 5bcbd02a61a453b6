"""What the answers of a revision were: how many, how many failed, how long they took; and whether a canary fails more
often than the others.

A canary is judged by Fisher's exact test, once a second, so its level is strict: over 10,000 answers of two revisions
that fail equally often, a canary is rolled back by chance in fewer than 1 of 100 trials (tests/control/test_counts.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

SHOWN_Z = 1.96
"""Standard errors of the intervals that are shown: 95 %."""
SURE = 1e-4
"""A canary's failures count as its own where so many would come about by chance with at most this probability."""


@dataclass(slots=True)
class Counts:
    """Sums over the answers of a revision. A request whose client has gone is left out."""

    requests: float = 0
    errors: float = 0
    """Answers with a status of 500 or more, answers that broke off, and requests that reached no replica."""
    seconds: float = 0
    """To the last byte, of those that did not fail."""
    squares: float = 0
    """Of the seconds."""

    def add(self, seconds: float, *, failed: bool) -> None:
        self.requests += 1
        self.errors += failed
        if not failed:
            self.seconds += seconds
            self.squares += seconds**2

    def plus(self, stored: Mapping[str, float]) -> dict[str, float]:
        """Return the sums together with those that the database has."""
        return {each.name: getattr(self, each.name) + stored.get(each.name, 0) for each in fields(Counts)}


def wilson(hits: float, trials: float) -> tuple[float, float]:
    """Return Wilson's interval of a rate."""
    if not trials:
        return 0.0, 1.0
    rate, spread = hits / trials, SHOWN_Z**2 / trials
    middle = rate + spread / 2
    reach = SHOWN_Z * math.sqrt(rate * (1 - rate) / trials + spread / trials / 4)
    return max(0.0, (middle - reach) / (1 + spread)), min(1.0, (middle + reach) / (1 + spread))


def mean(total: float, squares: float, count: float) -> tuple[float, float]:
    """Return a mean and how far its 95 % interval reaches to each side; infinity of fewer than two values."""
    if count < 2:
        return (total / count if count else 0.0), math.inf
    middle = total / count
    variance = max(0.0, squares / count - middle**2) * count / (count - 1)
    return middle, SHOWN_Z * math.sqrt(variance / count)


def why_worse(canary: Counts, others: Counts) -> str:
    """Return how the canary fails more often than the others, beyond chance; empty if that is not sure."""
    requests, errors = canary.requests + others.requests, canary.errors + others.errors
    if not others.requests or canary.errors * requests <= errors * canary.requests:
        return ""
    if _chance(int(canary.errors), int(canary.requests), int(errors), int(requests)) > SURE:
        return ""
    return (
        f"{canary.errors:.0f} of its {canary.requests:.0f} answers failed, and {others.errors:.0f} of "
        f"{others.requests:.0f} of the others: more than chance explains"
    )


def _chance(hits: int, drawn: int, marked: int, total: int) -> float:
    """Return the probability that of `drawn` of `total`, `marked` of which are marked, at least `hits` are marked."""
    whole = _ln_choose(total, drawn)
    return sum(
        math.exp(_ln_choose(marked, each) + _ln_choose(total - marked, drawn - each) - whole)
        for each in range(hits, min(drawn, marked) + 1)
        if drawn - each <= total - marked
    )


def _ln_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
