"""How many requests a key may send: a bucket for each, in memory, since one process answers them all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_MOST_BUCKETS = 4096


@dataclass
class _Bucket:
    tokens: float
    at: float


class RateLimit:
    """`per_s`: requests a second that a caller may send for long, 0: no limit; four times as many at once."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s, self.burst, self._clock = per_s, max(1.0, 4 * per_s), clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, caller: str) -> float:
        """Take a token for a request. Return 0; or the seconds until there is one, and take none."""
        if not self.per_s:
            return 0.0
        now = self._clock()
        if len(self._buckets) >= _MOST_BUCKETS and caller not in self._buckets:
            self._forget_the_full(now)
        bucket = self._buckets.setdefault(caller, _Bucket(self.burst, now))
        bucket.tokens, bucket.at = min(self.burst, bucket.tokens + (now - bucket.at) * self.per_s), now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / self.per_s
        bucket.tokens -= 1
        return 0.0

    def _forget_the_full(self, now: float) -> None:
        """A bucket that is full again is as good as none."""
        full_after = self.burst / self.per_s
        self._buckets = {name: each for name, each in self._buckets.items() if now - each.at < full_after}
