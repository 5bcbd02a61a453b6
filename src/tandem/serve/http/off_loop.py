"""Run work of a request on a thread, so that it does not block the event loop and with it other requests.

consumes: functions of one request each     waits for: one of a few slots
produces: their results                     ends a thread at its deadline

Each function has its own daemon thread, not one of a pool. An exception raised inside the thread ends an endless loop.
A thread that cannot be ended does not delay the exit of the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, TypeVarTuple, Unpack

from tandem.serve.http.refusals import RequestRefused

_AT_A_TIME = 4
DEADLINE_S = 10.0

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _GivenUp(SystemExit):
    """Raised inside a thread that is past its deadline; `except Exception` does not catch it."""


class OffLoop:
    def __init__(self, at_a_time: int = _AT_A_TIME) -> None:
        self._slots = asyncio.Semaphore(at_a_time)

    async def __call__(self, work: Callable[[Unpack[Ts]], T], *args: *Ts, deadline_s: float = 0.0) -> T:
        """Return the work's result or raise its error; RequestRefused if it is not done in time."""
        loop, deadline_s = asyncio.get_running_loop(), deadline_s or DEADLINE_S
        await self._take_slot()
        answers: list[asyncio.Future[T]] = [loop.create_future()]
        ended = False

        def end(result: T | None, error: BaseException | None) -> None:
            nonlocal ended
            if ended:
                return
            ended = True
            self._slots.release()
            for answer in answers:  # empty, if the caller gave up
                answer.set_exception(error) if error else answer.set_result(result)  # type: ignore[arg-type]

        def tell(result: T | None, error: BaseException | None) -> None:
            with suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(end, result, error)

        def run() -> None:
            try:
                try:
                    result = work(*args)
                except Exception as error:  # noqa: BLE001 - it belongs to the request that waits for it
                    tell(None, error)
                else:
                    tell(result, None)
            except _GivenUp:
                tell(None, TimeoutError())

        thread = threading.Thread(target=run, name="aside", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(deadline_s):
                return await answers[0]
        except TimeoutError:
            text = f"this request could not be read within {deadline_s:g} s; send a shorter or simpler one"
            raise RequestRefused(422, text, code="too_slow") from None
        finally:
            answers.clear()  # breaks the cycle of an error and this frame, which only gc would free
            if not ended:
                _give_up(thread)

    async def _take_slot(self) -> None:
        """Wait for a slot; the thread frees it when it ends."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._slots.acquire()
        except TimeoutError:
            raise RequestRefused(429, "other large requests are being read; send it again") from None


def _give_up(thread: threading.Thread) -> None:
    """Raise _GivenUp in the thread, at the next line of Python that it runs."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_GivenUp))
