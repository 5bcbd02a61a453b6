"""A deadline for code that blocks.

An environment is somebody else's code. `asyncio.timeout` ends it where it awaits; where it blocks (`time.sleep`, an
endless loop, a slow regular expression) the whole event loop stands still. So each of its turns runs under an alarm
signal that raises inside it. Signals reach the main thread only: elsewhere the alarm is not engaged, and says so.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Blocked(BaseException):
    """Raised inside code that held the event loop too long. Not an Exception: a broad `except` must not swallow it."""


def why_not() -> str:
    """Empty if the alarm can be engaged here, else the reason."""
    if not hasattr(signal, "setitimer"):
        return "this platform has no interval timer"
    if threading.current_thread() is not threading.main_thread():
        return "signals reach the main thread only, and this is another one"
    return ""


class Guarded:
    """Awaits a coroutine; raises Blocked inside it when one of its turns holds the event loop for `limit_s`."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], limit_s: float) -> None:
        self._coroutine, self._limit_s = coroutine, limit_s

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                with _alarm(self._limit_s):
                    waiting_for = resume()
            except StopIteration as stop:
                return stop.value
            try:
                resume = partial(self._coroutine.send, (yield waiting_for))
            except BaseException as error:  # noqa: BLE001 - cancellation and errors belong inside the coroutine
                resume = partial(self._coroutine.throw, error)


@contextmanager
def _alarm(limit_s: float) -> Generator[None]:
    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise Blocked(f"held the event loop for {limit_s:g} s")

    if why_not():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
