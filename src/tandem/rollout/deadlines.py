"""Deadlines for environment code, also when it blocks the event loop or swallows its cancellation.

`asyncio.timeout` ends an environment only where it awaits. This module handles three other cases:
- Code that blocks (`time.sleep`, an endless loop, a slow regular expression) blocks the whole event loop. So each turn
  of the coroutine runs under an alarm signal that raises inside it. Signals reach the main thread only; elsewhere the
  alarm is not engaged, and `why_not` says so.
- Code that swallows its cancellation (a bare `except:` around an `await`) gets `GRACE_S` to clean up. Then it is
  abandoned.
- While one environment blocks, the others cannot run, so their deadlines are extended by that time.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

GRACE_S = 1.0  # for cleanup in a cancelled coroutine, such as closing a session
_NOTICEABLE_S = 0.01  # shorter turns do not extend the other deadlines


class Blocked(BaseException):
    """Raised inside environment code to stop it. Not an Exception, so that a broad `except` does not swallow it."""


def why_not() -> str:
    """Return why the alarm cannot be engaged in this thread; empty if it can."""
    if not hasattr(signal, "setitimer"):
        return "this platform has no interval timer"
    if threading.current_thread() is not threading.main_thread():
        return "signals reach the main thread only, and this is another one"
    return ""


class Clock:
    """The deadlines of episodes that share an event loop and an engine."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._awaiting_engine: set[asyncio.Timeout] = set()
        self._tokens = self._tokens_before = self._quiet_quarters = 0
        self._next_check: asyncio.TimerHandle | None = None

    def token(self, *_: object) -> None:
        """Note that the engine made a token, for any request."""
        self._tokens += 1

    @asynccontextmanager
    async def engine_deadline(
        self, limit_s: float, is_coming: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[None]:
        """Raise TimeoutError once the engine has made no token for any request for `limit_s`.

        A queued request does not mean a silent engine, and neither does an event loop blocked by a training step. So
        silence is counted in quarters of the limit: a long block counts as one quarter. An engine that is starting
        (`is_coming`) does not count as silent; its start has its own deadline.
        """
        async with asyncio.timeout(None) as timeout:
            if not self._awaiting_engine:
                self._quiet_quarters = 0
                self._check_later(limit_s / 4, is_coming)
            self._awaiting_engine.add(timeout)
            try:
                yield
            finally:
                self._awaiting_engine.discard(timeout)
                if not self._awaiting_engine and self._next_check is not None:
                    self._next_check.cancel()

    def _check_later(self, quarter_s: float, is_coming: Callable[[], bool]) -> None:
        self._next_check = asyncio.get_running_loop().call_later(quarter_s, self._check, quarter_s, is_coming)

    def _check(self, quarter_s: float, is_coming: Callable[[], bool]) -> None:
        self._quiet_quarters = (
            self._quiet_quarters + 1 if self._tokens == self._tokens_before and not is_coming() else 0
        )
        self._tokens_before = self._tokens
        if self._quiet_quarters == 4:
            self._quiet_quarters = 0
            for timeout in self._awaiting_engine:
                timeout.reschedule(asyncio.get_running_loop().time())
        self._check_later(quarter_s, is_coming)

    @asynccontextmanager
    async def deadline(self, limit_s: float) -> AsyncGenerator[asyncio.Timeout]:
        async with asyncio.timeout(limit_s) as timeout:
            self._open.add(timeout)
            try:
                yield timeout
            finally:
                self._open.discard(timeout)

    def extend_others(self, held_s: float, except_for: asyncio.Timeout) -> None:
        """Extend the other episodes' deadlines by the time that one episode blocked the event loop."""
        for timeout in self._open - {except_for}:
            if (when := timeout.when()) is not None and not timeout.expired():
                timeout.reschedule(when + held_s)


class Guarded(Generic[T]):
    """Await a coroutine; raise Blocked when one of its turns blocks the event loop for `limit_s`."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], limit_s: float, on_turn: Callable[[float], None]) -> None:
        self._coroutine, self._limit_s, self._on_turn = coroutine, limit_s, on_turn

    def __await__(self) -> Generator[Any, Any, T]:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        second_cancel: asyncio.TimerHandle | None = None
        resume: Callable[[], Any] = partial(self._coroutine.send, None)
        try:
            while True:
                try:
                    waiting_for = self._turn(resume)
                except StopIteration as stop:
                    return stop.value
                except Blocked:
                    _abandon(self._coroutine)
                    raise
                if task.cancelling() and second_cancel is None:
                    second_cancel = loop.call_later(GRACE_S, task.cancel)
                try:
                    resume = partial(self._coroutine.send, (yield waiting_for))
                except BaseException as error:
                    if second_cancel is not None and loop.time() >= second_cancel.when():
                        task.uncancel()  # only our own cancel; the caller's remains
                        _abandon(self._coroutine)
                        raise
                    resume = partial(self._coroutine.throw, error)
                if second_cancel is not None and not task.cancelling():
                    second_cancel.cancel()
                    second_cancel = None
        finally:
            if second_cancel is not None:
                second_cancel.cancel()

    def _turn(self, resume: Callable[[], Any]) -> Any:
        started = time.monotonic()
        try:
            return _under_alarm(resume, self._limit_s)
        finally:
            if (held_s := time.monotonic() - started) > _NOTICEABLE_S:
                self._on_turn(held_s)


def _abandon(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Keep an abandoned coroutine alive for ever. Collecting it would throw GeneratorExit into it, and code that
    swallows every exception in a loop would spin for ever."""
    if inspect.getcoroutinestate(coroutine) == inspect.CORO_SUSPENDED:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(coroutine))


def _under_alarm(resume: Callable[[], Any], limit_s: float) -> Any:
    if why_not():
        return resume()
    armed, rang = True, False

    def ring(_signal: int, _frame: FrameType | None) -> None:
        nonlocal rang
        if armed:
            rang = True
            raise Blocked(f"held the event loop for {limit_s:g} s")

    started = time.monotonic()
    previous_handler = signal.signal(signal.SIGALRM, ring)
    # The alarm repeats, because a bare `except:` may swallow the first one.
    previous_delay_s, previous_interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        try:
            return resume()
        finally:
            armed = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler or signal.SIG_DFL)
        if previous_delay_s:
            left_s = previous_delay_s - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3), previous_interval_s)
        if rang:  # even if the code swallowed the alarm
            raise Blocked(f"held the event loop for {limit_s:g} s") from None
