"""Judge whether a model improved: a paired bootstrap over the tasks that were played before and after.

improved, worse   the interval of the mean change does not contain 0
unchanged         the interval contains 0 and lies within the margin, and there are enough tasks that a change of 5 % of
                  all tasks would show
undecided         anything else: there are too few tasks, or the interval is too wide
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, Literal

from tandem.types import Measure

Word = Literal["improved", "unchanged", "worse", "undecided"]

RESAMPLES = 4000
_BLOCK = 2_000_000  # drawn indices held in memory at once
_SHARE = 0.05
"""Share of the tasks; smaller changes are ignored. So `unchanged` allows accuracy to change by this much."""
_SMALL_EFFECT = 0.2
"""Change of a loss or reward that `unchanged` allows, in standard deviations of the scores (Cohen's d)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict. `difference` and `interval` are always after minus before, also for a loss."""

    verdict: Word
    before: float
    after: float
    difference: float
    interval: tuple[float, float]
    confidence: float
    tasks: int
    margin: float
    """For `unchanged`, the interval must lie within plus or minus this."""
    why: str = ""
    """Why it is undecided."""

    def evaluation(self) -> dict[str, Any]:
        """Return the fields for status.json, besides the compared numbers."""
        told = {"tasks": self.tasks, "interval": list(self.interval), "confidence": self.confidence}
        return told | {"margin": self.margin} | ({"why": self.why} if self.why else {})


def judge(
    before: Sequence[float], after: Sequence[float], *, confidence: float, measure: Measure, seed: int = 0
) -> Verdict:
    """Compare one number per task, in the same order both times: pairing removes the noise of the tasks' difficulty."""
    import numpy as np

    if len(before) != len(after) or not before:
        raise ValueError(f"a paired verdict needs the same tasks twice: {len(before)} before, {len(after)} after")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence}: must lie between 0 and 1")
    before_N, after_N = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    changes = [float(change) for change in after_N - before_N]
    if not np.isfinite(changes).all():
        raise ValueError("a paired verdict needs finite scores; score a task that failed as 0")
    interval = _interval(changes, confidence, seed)
    margin = _SHARE if measure == "accuracy" else _SMALL_EFFECT * float(before_N.std())
    word, why = decide(interval, margin, tasks=len(changes), confidence=confidence, measure=measure)
    return Verdict(
        verdict=word,
        before=float(before_N.mean()),
        after=float(after_N.mean()),
        difference=float(np.mean(changes)),
        interval=interval,
        confidence=confidence,
        tasks=len(changes),
        margin=margin,
        why=why,
    )


def decide(
    interval: tuple[float, float], margin: float, *, tasks: int, confidence: float, measure: Measure
) -> tuple[Word, str]:
    """Return the verdict for an interval of after minus before, and why it is undecided."""
    low, high = interval
    if why := too_few(tasks, confidence):
        return "undecided", why
    if low > 0.0 or high < 0.0:
        return ("improved" if (low > 0.0) == (measure != "loss") else "worse"), ""
    if tasks < (enough := _enough_for_unchanged(confidence)):
        return "undecided", f"the interval contains 0, and `unchanged` needs {enough} held-out examples, not {tasks}"
    if not -margin <= low <= high <= margin:
        allowed = f"{margin * 100:g} points" if measure == "accuracy" else f"{margin:.3g}"
        return "undecided", f"the interval contains 0, and is wider than the ±{allowed} of `unchanged`"
    return "unchanged", ""


def too_few(tasks: int, confidence: float) -> str:
    """Return why so few tasks cannot show any change; empty if they can."""
    needed = next(count for count in range(1, 1000) if not _by_chance(count, confidence))
    if tasks >= needed:
        return ""
    return (
        f"{tasks} held-out examples are too few for a verdict: at {confidence * 100:g} % confidence it needs {needed}"
    )


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t. With x = sqrt(degrees) tan(angle), its distribution function is the integral of
    a power of the cosine."""
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)

    def below(angle: float, pieces: int = 400) -> float:
        step = angle / pieces  # Simpson's rule
        inner = sum((4 if i % 2 else 2) * math.cos(i * step) ** (degrees - 1) for i in range(1, pieces))
        return 0.5 + factor * step / 3 * (1 + inner + math.cos(angle) ** (degrees - 1))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _interval(changes: Sequence[float], confidence: float, seed: int) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean change, widened for few tasks as Student's t is."""
    import numpy as np

    changes_N = np.asarray(changes)
    rng = np.random.default_rng(seed)
    rows = max(1, _BLOCK // len(changes_N))
    means = np.concatenate(
        [
            changes_N[rng.integers(0, len(changes_N), (min(rows, RESAMPLES - start), len(changes_N)))].mean(axis=1)
            for start in range(0, RESAMPLES, rows)
        ]
    )
    tail = _tail(len(changes), confidence)
    low, high = (float(bound) for bound in np.quantile(means, [tail, 1 - tail]))
    if _by_chance(sum(change != 0.0 for change in changes), confidence):
        return min(low, 0.0), max(high, 0.0)
    return low, high


def _tail(count: int, confidence: float) -> float:
    """Return the share of the bootstrap's means to cut off at each side. With few numbers the means spread too little:
    by sqrt((n - 1) / n), and by the ratio of t to the normal. This widens the interval (the expanded percentile
    interval: Hesterberg, What Teachers Should Know about the Bootstrap, 2015)."""
    if count < 2:
        return 0.0
    return NormalDist().cdf(-math.sqrt(count / (count - 1)) * t_quantile((1 + confidence) / 2, count - 1))


def _by_chance(changed: int, confidence: float) -> bool:
    """Return whether chance may explain that all m changed tasks changed the same way: the probability is 2 ** (1 - m).

    The bootstrap ignores this: three tasks that all changed by 1 would have the interval [1, 1].
    """
    return 2.0 ** (1 - changed) > 1 - confidence


def _enough_for_unchanged(confidence: float) -> int:
    """Return how many tasks are needed to see a change of one task in twenty: 59 at 95 % (the rule of three)."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - _SHARE))
