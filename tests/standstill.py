"""Whether the machine stood still: a thread on each processor looks at the clock, and does not come to it in time."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

_LOOK_EVERY_S = 0.02
_PLACES = [{cpu} for cpu in os.sched_getaffinity(0)] if hasattr(os, "sched_getaffinity") else [set[int]()]


class Standstill:
    def __init__(self) -> None:
        self._longest_s = 0.0
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._look, args=[place], name=f"looks at the clock on {place}", daemon=True)
            for place in _PLACES
        ]

    def __enter__(self) -> Standstill:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def begin(self) -> None:
        self._longest_s = 0.0

    def longest_s(self) -> float:
        """Of any processor, since it began. Not while this process worked without a break: then none of its threads
        comes to anything, and the machine is well."""
        time.sleep(2 * _LOOK_EVERY_S)  # whoever could not look does so now
        return self._longest_s

    def _look(self, place: set[int]) -> None:
        if place:
            os.sched_setaffinity(0, place)  # this thread's alone
        looked, worked = time.monotonic(), time.process_time()
        while not self._end.wait(_LOOK_EVERY_S):
            now, by_now = time.monotonic(), time.process_time()
            if by_now - worked < (now - looked) / 4:  # else it had its share of a busy one
                self._longest_s = max(self._longest_s, now - looked)
            looked, worked = now, by_now
