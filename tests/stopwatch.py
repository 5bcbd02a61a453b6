"""Seconds in which this process could have worked.

How long something may take is said of the code, not of the machine: while that stands still, or gives its processors to
others, nobody here is late. So a thread looks at the clock a hundred times a second, and of the time between two looks
no more than _LONGEST_LOOK_S counts. Whoever waits for what does not come, waits all the same.
"""

from __future__ import annotations

import threading
import time
from typing import Any

_LOOK_EVERY_S, _LONGEST_LOOK_S = 0.01, 0.05


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = self.wall_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._count, name="stopwatch", daemon=True)

    def __enter__(self) -> Stopwatch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._thread.join()

    def _count(self) -> None:
        looked, ended = time.monotonic(), False
        while not ended:
            ended = self._end.wait(_LOOK_EVERY_S)
            now = time.monotonic()
            self.seconds += min(now - looked, _LONGEST_LOOK_S)
            self.wall_s += now - looked
            looked = now
