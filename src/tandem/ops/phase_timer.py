"""Measure the phases of an operation. Phase names must be listed in obs/sync_report.py, or reports omit them."""

from __future__ import annotations

import time


class Phases:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        """End a phase: add the time since the last call to `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now
