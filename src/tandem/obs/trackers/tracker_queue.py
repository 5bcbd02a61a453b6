"""Send rows to trackers. The run never waits for a slow tracker, and never fails because of a broken one.

consumes: rows, on the trainer's thread      waits for: nothing; a full queue drops rows and counts them
produces: calls of a tracker, on its thread  waits for: the tracker's process (tracker_process.py)
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from tandem.obs.run_history import number

_log = logging.getLogger(__name__)

_WAITING_ROWS = 1024
_CLOSE_S = 10.0  # for all trackers together, at the end of a run


class Tracker(Protocol):
    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...  # from another thread, while one of the calls above hangs


Opener = Callable[[], Tracker]


class Feed:
    """All trackers of a run. `openers` by name, each called on its tracker's thread. `tell` gets a sentence per
    failure."""

    def __init__(
        self,
        openers: Mapping[str, Opener],
        *,
        tell: Callable[[str], object] = _log.warning,
        waiting_rows: int = _WAITING_ROWS,
    ) -> None:
        self._lines = [_TrackerQueue(name, opener, tell, waiting_rows) for name, opener in openers.items()]

    def row(self, row: Mapping[str, Any]) -> None:
        """Queue a row of metrics.jsonl for all trackers."""
        if self._lines:
            step = int(row.get("step", 0))
            numbers = {key: value for key, item in row.items() if key != "step" and (value := number(item)) is not None}
            for line in self._lines:
                line.put(step, numbers)

    def close(self, within_s: float = _CLOSE_S) -> None:
        """Deliver the queued rows, as far as the time allows, then end the trackers."""
        until = time.monotonic() + within_s
        for line in self._lines:
            line.end()
        for line in self._lines:
            line.join(max(0.0, until - time.monotonic()))
        self._lines = []


class _TrackerQueue:
    """One tracker: its queue, its thread, and one warning."""

    def __init__(self, name: str, opener: Opener, tell: Callable[[str], object], waiting_rows: int) -> None:
        self._name, self._open, self._tell, self._dropped = name, opener, tell, 0
        self._tracker: Tracker | None = None
        self._queue: queue.Queue[tuple[int, Mapping[str, float]]] = queue.Queue(waiting_rows)
        self._ends, self._warned = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name=f"track-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, numbers: Mapping[str, float]) -> None:
        try:
            self._queue.put_nowait((step, numbers))
        except queue.Full:
            self._dropped += 1
            self._warn("is slower than the run and misses rows; metrics.jsonl has them all")

    def end(self) -> None:
        self._ends.set()

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._warn(f"did not end in time: it misses {self._queue.qsize() + self._dropped} rows")
            if self._tracker is not None:
                self._tracker.kill()

    def _work(self) -> None:
        try:
            tracker = self._tracker = self._open()
            for step, numbers in self._rows():
                tracker.log(step, numbers)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - a tracker's failure, of whatever kind, must not end the run
            why = str(error) if isinstance(error, ChildProcessError) else f"{type(error).__name__}: {error}"
            self._warn(f"failed and gets no more rows; metrics.jsonl has them all: {why}")
            for _ in self._rows():
                pass

    def _rows(self) -> Iterable[tuple[int, Mapping[str, float]]]:
        while True:
            try:
                yield self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._ends.is_set():
                    return

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._tell(f"track: {self._name} {what}")
