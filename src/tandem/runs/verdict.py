"""Did it get better? A paired bootstrap over the tasks that were played before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

RESAMPLES = 4000
_BLOCK = 2_000_000  # drawn indices held in memory at once


@dataclass(frozen=True, slots=True)
class Verdict:
    """`difference` and `interval` are after minus before, whichever direction is the better one."""

    verdict: Literal["improved", "unchanged", "worse"]
    before: float
    after: float
    difference: float
    interval: tuple[float, float]
    confidence: float
    tasks: int


def judge(
    before: Sequence[float],
    after: Sequence[float],
    *,
    confidence: float,
    seed: int = 0,
    higher_is_better: bool = True,
) -> Verdict:
    """One number per task, in the same order both times: pairing takes the tasks' own difficulty out of the noise.

    `unchanged` says that the interval holds 0: these tasks cannot tell the two apart; they may still differ.
    """
    import numpy as np

    if len(before) != len(after) or not before:
        raise ValueError(f"a paired verdict needs the same tasks twice: {len(before)} before, {len(after)} after")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence}: must lie between 0 and 1")
    before_N, after_N = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    changes = [float(change) for change in after_N - before_N]
    if not np.isfinite(changes).all():
        raise ValueError("a paired verdict needs finite scores; score a task that failed as 0")
    low, high = _interval(changes, confidence, seed)
    difference = float(np.mean(changes))
    return Verdict(
        verdict=_word(low, high, higher_is_better),
        before=float(before_N.mean()),
        after=float(after_N.mean()),
        difference=difference,
        interval=(low, high),
        confidence=confidence,
        tasks=len(changes),
    )


def _interval(changes: Sequence[float], confidence: float, seed: int) -> tuple[float, float]:
    """Percentile bootstrap of the mean change."""
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
    tail = (1 - confidence) / 2
    low, high = (float(bound) for bound in np.quantile(means, [tail, 1 - tail]))
    if _too_few_changed(changes, confidence):
        return min(low, 0.0), max(high, 0.0)
    return low, high


def _too_few_changed(changes: Sequence[float], confidence: float) -> bool:
    """With m tasks changed, even all of them in one direction happens by chance with probability 2 ** (1 - m).

    The bootstrap does not know this: three tasks that all changed by 1 would give it the interval [1, 1].
    """
    changed = sum(change != 0.0 for change in changes)
    return 2.0 ** (1 - changed) > 1 - confidence


def _word(low: float, high: float, higher_is_better: bool) -> Literal["improved", "unchanged", "worse"]:
    if low <= 0.0 <= high:
        return "unchanged"
    return "improved" if (low > 0.0) == higher_is_better else "worse"
