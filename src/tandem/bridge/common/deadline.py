"""Deadlines that hold even for calls that cannot be interrupted.

Some native calls block: connecting to a stopped process, a collective whose partner is gone, a write to a file server
that went away. They run on threads that are left behind when the caller's deadline ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from tandem.errors import SyncError, SyncTimeout

_T = TypeVar("_T")
_LOOK_S = 0.05  # how often a wait checks whether it was given up


class Deadline:
    def __init__(self, mode: str, seconds: float, given_up: threading.Event | None = None) -> None:
        """Setting `given_up` ends every wait early."""
        self._mode, self._seconds = mode, seconds
        self._ends = time.monotonic() + seconds
        self._given_up = given_up or threading.Event()

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def check(self, what_failed: str) -> None:
        """Raise if time is up or the wait was given up. `what_failed`: a clause, 'version 3 was not sent'."""
        if self._given_up.is_set():
            raise SyncError(f"{self._mode}: {what_failed}: this connection was given up for a new one")
        if not self.left_s:
            raise self.missed(what_failed)

    def missed(self, what_failed: str) -> SyncTimeout:
        return SyncTimeout(f"{self._mode}: {what_failed} within {self._seconds:g} s")

    def until(self, done: Callable[[], bool], what_failed: str, *, every_s: float = 0.002) -> None:
        began = time.monotonic()
        while not done():
            self.check(what_failed)
            # Sleep a fifth of the time waited so far: a transfer of a few milliseconds should not wait for the next
            # check.
            time.sleep(min(max(5e-5, (time.monotonic() - began) / 5), every_s))

    def call(self, function: Callable[[], _T], what_failed: str) -> _T:
        """Run `function` on a thread; return its result or raise its error. When time is up the thread is left behind,
        so `function` must not change anything shared."""
        future: Future[_T] = Future()
        ended = threading.Event()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                future.set_exception(error)
            ended.set()

        self.check(what_failed)
        run_on_thread(run)
        self.wait(ended, what_failed)
        return future.result()

    def wait(self, ended: threading.Event, what_failed: str) -> None:
        while not ended.wait(min(_LOOK_S, self.left_s)):
            self.check(what_failed)


def run_on_thread(work: Callable[[], None]) -> None:
    """Run `work` on an idle thread if there is one: starting a thread takes a tenth of a millisecond."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.work.put(work)


class _Worker:
    """A thread that runs one call after another. After a call that was left behind it becomes idle when the call
    ends."""

    def __init__(self) -> None:
        self.work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._go_on, name="sync", daemon=True).start()

    def _go_on(self) -> None:
        while True:
            self.work.get()()
            _idle.append(self)


_idle: deque[_Worker] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # the threads belong to the parent
