"""Deadlines for somebody else's code.

`asyncio.timeout` ends an environment where it awaits. Three things it cannot do are done here:
- Code that blocks (`time.sleep`, an endless loop, a slow regular expression) stands still with the whole event loop. So
  each of its turns runs under an alarm signal that raises inside it. Signals reach the main thread only: elsewhere the
  alarm is not engaged, and says so.
- Code that swallows its cancellation (a bare `except:` around an `await`) gets a moment to clean up, and is then left.
- While one environment blocks, nobody else can get on: the others' deadlines stand still.
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

GRACE_S = 1.0  # for what a cancelled coroutine still awaits: closing a session, say
_NOTICEABLE_S = 0.01  # a turn that is shorter than this moves nobody's deadline


class Blocked(BaseException):
    """Raised inside code that must not go on. Not an Exception: a broad `except` must not swallow it."""


def why_not() -> str:
    """Empty if the alarm can be engaged here, else the reason."""
    if not hasattr(signal, "setitimer"):
        return "this platform has no interval timer"
    if threading.current_thread() is not threading.main_thread():
        return "signals reach the main thread only, and this is another one"
    return ""


class Clock:
    """The deadlines of episodes that share an event loop and an engine."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._asking: set[asyncio.Timeout] = set()
        self._tokens = self._seen = self._quiet = 0
        self._next_look: asyncio.TimerHandle | None = None

    def token(self, *_: object) -> None:
        """The engine made a token, for whomever."""
        self._tokens += 1

    @asynccontextmanager
    async def engine_deadline(
        self, limit_s: float, is_coming: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[None]:
        """TimeoutError once the engine has made no token for anybody for `limit_s`.

        A request that waits its turn is not a silent engine, and neither is an event loop that was held by a training
        step: so silence is counted in quarters of the limit, and a long standstill is one of them. Nor is one that is
        being started: that has a deadline of its own.
        """
        async with asyncio.timeout(None) as timeout:
            if not self._asking:
                self._quiet = 0
                self._look_later(limit_s / 4, is_coming)
            self._asking.add(timeout)
            try:
                yield
            finally:
                self._asking.discard(timeout)
                if not self._asking and self._next_look is not None:
                    self._next_look.cancel()

    def _look_later(self, quarter_s: float, is_coming: Callable[[], bool]) -> None:
        self._next_look = asyncio.get_running_loop().call_later(quarter_s, self._look, quarter_s, is_coming)

    def _look(self, quarter_s: float, is_coming: Callable[[], bool]) -> None:
        self._quiet = self._quiet + 1 if self._tokens == self._seen and not is_coming() else 0
        self._seen = self._tokens
        if self._quiet == 4:
            self._quiet = 0
            for timeout in self._asking:
                timeout.reschedule(asyncio.get_running_loop().time())
        self._look_later(quarter_s, is_coming)

    @asynccontextmanager
    async def deadline(self, limit_s: float) -> AsyncGenerator[asyncio.Timeout]:
        async with asyncio.timeout(limit_s) as timeout:
            self._open.add(timeout)
            try:
                yield timeout
            finally:
                self._open.discard(timeout)

    def stood_still(self, held_s: float, its_own: asyncio.Timeout) -> None:
        """One episode held the event loop: that is none of the others' time."""
        for timeout in self._open - {its_own}:
            if (when := timeout.when()) is not None and not timeout.expired():
                timeout.reschedule(when + held_s)


class Guarded(Generic[T]):
    """Awaits a coroutine; Blocked when one of its turns holds the event loop for `limit_s`."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], limit_s: float, on_turn: Callable[[float], None]) -> None:
        self._coroutine, self._limit_s, self._on_turn = coroutine, limit_s, on_turn

    def __await__(self) -> Generator[Any, Any, T]:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        insist: asyncio.TimerHandle | None = None
        resume: Callable[[], Any] = partial(self._coroutine.send, None)
        try:
            while True:
                try:
                    waiting_for = self._turn(resume)
                except StopIteration as stop:
                    return stop.value
                except Blocked:
                    _leave(self._coroutine)
                    raise
                if task.cancelling() and insist is None:
                    insist = loop.call_later(GRACE_S, task.cancel)
                try:
                    resume = partial(self._coroutine.send, (yield waiting_for))
                except BaseException as error:
                    if insist is not None and loop.time() >= insist.when():
                        task.uncancel()  # ours; whoever cancelled it first still finds theirs
                        _leave(self._coroutine)
                        raise
                    resume = partial(self._coroutine.throw, error)
                if insist is not None and not task.cancelling():
                    insist.cancel()
                    insist = None
        finally:
            if insist is not None:
                insist.cancel()

    def _turn(self, resume: Callable[[], Any]) -> Any:
        started = time.monotonic()
        try:
            return _under_alarm(resume, self._limit_s)
        finally:
            if (held_s := time.monotonic() - started) > _NOTICEABLE_S:
                self._on_turn(held_s)


def _leave(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Nobody awaits it any more, and nobody may collect it: Python would throw GeneratorExit into it, and code that
    swallows everything in a loop would then spin for ever, at the latest when the interpreter ends."""
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
    their_handler = signal.signal(signal.SIGALRM, ring)
    # It rings again and again: a bare `except:` may swallow the first.
    their_delay_s, their_interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        try:
            return resume()
        finally:
            armed = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, their_handler or signal.SIG_DFL)
        if their_delay_s:
            left_s = their_delay_s - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3), their_interval_s)
        if rang:  # whatever it made of the alarm
            raise Blocked(f"held the event loop for {limit_s:g} s") from None
