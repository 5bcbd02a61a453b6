"""Rows to trackers, which may be slow, fail or hang: the run never waits for one, and never fails by one.

consumes: rows, on the trainer's thread      waits for: nothing; what does not fit a full queue is dropped and counted
produces: calls of a tracker, on its thread  waits for: the tracker
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tandem.obs.history import number

_log = logging.getLogger(__name__)

_WAITING_ROWS = 1024
_CLOSE_S = 10.0  # for all of them together, at the end of a run


class Tracker(Protocol):
    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


Opener = Callable[[], Tracker]


class Feed:
    """`openers` by name: each is called on the thread of its tracker, so that an import costs the run nothing."""

    def __init__(self, openers: Mapping[str, Opener], *, waiting_rows: int = _WAITING_ROWS) -> None:
        self._lines = [_Line(name, opener, waiting_rows) for name, opener in openers.items()]

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl."""
        if self._lines:
            step = int(row.get("step", 0))
            numbers = {key: value for key, item in row.items() if key != "step" and (value := number(item)) is not None}
            for line in self._lines:
                line.put(step, numbers)

    def close(self, within_s: float = _CLOSE_S) -> None:
        """What waits is delivered, as far as the time goes."""
        until = time.monotonic() + within_s
        for line in self._lines:
            line.end()
        for line in self._lines:
            line.join(max(0.0, until - time.monotonic()))
        self._lines = []


class _Line:
    """One tracker: its queue, its thread, and one warning."""

    def __init__(self, name: str, opener: Opener, waiting_rows: int) -> None:
        self._name, self._open, self._dropped = name, opener, 0
        self._queue: queue.Queue[tuple[int, Mapping[str, float]]] = queue.Queue(waiting_rows)
        self._ends, self._warned = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name=f"track-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, numbers: Mapping[str, float]) -> None:
        try:
            self._queue.put_nowait((step, numbers))
        except queue.Full:
            self._dropped += 1
            self._warn("is slower than the run: rows are left out there; metrics.jsonl has them all")

    def end(self) -> None:
        self._ends.set()

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._warn(f"did not end in time: {self._queue.qsize() + self._dropped} rows are missing there")

    def _work(self) -> None:
        try:
            tracker = self._open()
            for step, numbers in self._rows():
                tracker.log(step, numbers)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - somebody else's library: whatever it raises must not end the run
            self._warn(f"failed, and is told nothing more: {type(error).__name__}: {error}")
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
            _log.warning("track: %s %s", self._name, what)


def openers(names: Sequence[str], *, directory: str, name: str, project: str, url: str) -> dict[str, Opener]:
    """Nothing is imported before a tracker's own thread opens it."""

    def tensorboard() -> Tracker:
        from tandem.obs.trackers.tensorboard import Tensorboard

        return Tensorboard(directory)

    def wandb() -> Tracker:
        from tandem.obs.trackers.wandb import Wandb

        return Wandb(directory, project, name)

    def trackio() -> Tracker:
        from tandem.obs.trackers.trackio import Trackio

        return Trackio(project, name)

    def mlflow() -> Tracker:
        from tandem.obs.trackers.mlflow import Mlflow

        return Mlflow(project, name, url)

    known: dict[str, Opener] = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio, "mlflow": mlflow}
    return {one: known[one] for one in dict.fromkeys(names)}
