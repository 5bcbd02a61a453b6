"""A served metric that falls with a version: the mean of its newest values there, against those of before."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.spec.online_gates import WatchSpec


@dataclass(frozen=True, slots=True)
class Regression:
    version: int
    before: float
    now: float
    samples: int
    text: str


class RegressionWatch:
    """Values count for the version that made the answer; late values of an older version count as before. A version
    with few ratings does not wash out what is known of those before it. A restarted server starts with no values."""

    def __init__(self, spec: WatchSpec) -> None:
        self._spec = spec
        self._version = -1
        self._before: deque[float] = deque(maxlen=spec.window)
        self._now: deque[float] = deque(maxlen=spec.window)
        self._told = False

    def activated(self, version: int, *, fell: bool = False) -> None:
        """`fell`: the version so far is gone back from. What was said of one that fell is no measure for the next."""
        if version == self._version:
            return
        if not fell and not self._told:
            self._before.extend(self._now)
        self._now.clear()
        self._version, self._told = version, False

    def add(self, version: int, value: float) -> Regression | None:
        """Says so once a version. Values of versions to come, and what is no number, count for nothing."""
        if not math.isfinite(value) or version > self._version:
            return None
        (self._now if version == self._version else self._before).append(value)
        return None if self._told else self._fallen()

    def _fallen(self) -> Regression | None:
        fewest = min(len(self._before), len(self._now))
        if fewest < self._spec.min_samples:
            return None
        before, now = statistics.fmean(self._before), statistics.fmean(self._now)
        fall = before - now if self._spec.better == "higher" else now - before
        noise = math.hypot(_stderr(self._before), _stderr(self._now))
        if fall <= self._spec.fall or fall <= self._spec.sigmas * noise:
            return None
        self._told = True
        text = (
            f"'{self._spec.metric}' went from {before:.4g} to {now:.4g} with version {self._version} ({len(self._now)} "
            f"values against {len(self._before)}; more than {self._spec.fall:g} and {self._spec.sigmas:g} standard "
            f"errors of {noise:.2g})"
        )
        return Regression(self._version, before, now, len(self._now), text)


def _stderr(values: Sequence[float] | deque[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))
