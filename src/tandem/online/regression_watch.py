"""Detect that a served metric falls with a version: compare the mean of its newest values with those before it."""

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
    """A value counts for the version that made the answer; a late value of an older version counts as one before. A
    version with few values does not push out those before it. A restarted server starts without values."""

    def __init__(self, spec: WatchSpec) -> None:
        self._spec = spec
        self._version = -1
        self._before: deque[float] = deque(maxlen=spec.window)
        self._now: deque[float] = deque(maxlen=spec.window)
        self._reported = False

    def activated(self, version: int, *, regressed: bool = False) -> None:
        """Another version is served. `regressed`: because the last one regressed. Its values are then dropped: they are
        no measure for the next version."""
        if version == self._version:
            return
        if not regressed and not self._reported:
            self._before.extend(self._now)
        self._now.clear()
        self._version, self._reported = version, False

    def add(self, version: int, value: float) -> Regression | None:
        """Add a value; return a Regression at most once a version. Values of later versions, NaN and infinity are
        ignored."""
        if not math.isfinite(value) or version > self._version:
            return None
        (self._now if version == self._version else self._before).append(value)
        return None if self._reported else self._regression()

    def _regression(self) -> Regression | None:
        fewest = min(len(self._before), len(self._now))
        if fewest < self._spec.min_samples:
            return None
        before, now = statistics.fmean(self._before), statistics.fmean(self._now)
        fall = before - now if self._spec.better == "higher" else now - before
        noise = math.hypot(_stderr(self._before), _stderr(self._now))
        if fall <= self._spec.fall or fall <= self._spec.sigmas * noise:
            return None
        self._reported = True
        text = (
            f"'{self._spec.metric}' went from {before:.4g} to {now:.4g} with version {self._version} ({len(self._now)} "
            f"values against {len(self._before)}; more than {self._spec.fall:g} and {self._spec.sigmas:g} standard "
            f"errors of {noise:.2g})"
        )
        return Regression(self._version, before, now, len(self._now), text)


def _stderr(values: Sequence[float] | deque[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))
