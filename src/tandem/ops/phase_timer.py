"""Where the time of one undertaking went. What may come is in obs/sync_report.py: whatever is not is not shown."""

from __future__ import annotations

import time


class Phases:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        """What happened since the last one ended was `name`; taken up again, it adds up."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now
