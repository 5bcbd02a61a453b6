"""Waiting that ends.

Some native calls cannot be interrupted: connecting to a process that is stopped, a collective whose partner is gone, a
write to a file server that went away. They run on threads that can be left behind, and the caller's deadline holds.
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
_LOOK_S = 0.05  # how often a wait looks whether it was given up


class Deadline:
    def __init__(self, mode: str, seconds: float, given_up: threading.Event | None = None) -> None:
        """Whoever sets `given_up` ends every wait before its time."""
        self._mode, self._seconds = mode, seconds
        self._ends = time.monotonic() + seconds
        self._given_up = given_up or threading.Event()

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def check(self, what_failed: str) -> None:
        """`what_failed` as a clause: 'version 3 was not sent'."""
        if self._given_up.is_set():
            raise SyncError(f"{self._mode}: {what_failed}: this meeting was given up for a new one")
        if not self.left_s:
            raise self.missed(what_failed)

    def missed(self, what_failed: str) -> SyncTimeout:
        return SyncTimeout(f"{self._mode}: {what_failed} within {self._seconds:g} s")

    def until(self, done: Callable[[], bool], what_failed: str, *, every_s: float = 0.002) -> None:
        began = time.monotonic()
        while not done():
            self.check(what_failed)
            # Late by a fifth of the wait: a transfer of a few milliseconds should not wait for the next look.
            time.sleep(min(max(5e-5, (time.monotonic() - began) / 5), every_s))

    def call(self, function: Callable[[], _T], what_failed: str) -> _T:
        """Its result, or its error. When time is up its thread is left behind; it must not touch anything shared."""
        future: Future[_T] = Future()
        ended = threading.Event()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                future.set_exception(error)
            ended.set()

        self.check(what_failed)
        leave_to_a_thread(run)
        self.wait(ended, what_failed)
        return future.result()

    def wait(self, ended: threading.Event, what_failed: str) -> None:
        while not ended.wait(min(_LOOK_S, self.left_s)):
            self.check(what_failed)


def leave_to_a_thread(work: Callable[[], None]) -> None:
    """One that waits for something to do: to start another takes a tenth of a millisecond."""
    try:
        hand = _idle.pop()
    except IndexError:
        hand = _Hand()
    hand.work.put(work)


class _Hand:
    """A thread for one call after another. One that was left behind comes back when its call ends, if it does."""

    def __init__(self) -> None:
        self.work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._go_on, name="sync", daemon=True).start()

    def _go_on(self) -> None:
        while True:
            self.work.get()()
            _idle.append(self)


_idle: deque[_Hand] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # their threads are the parent's
