"""Where the time of one undertaking went."""

from __future__ import annotations

import time


class Phases:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        """What happened since the last one ended was `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now
