"""Requests that wait for the gap between two jobs: to activate a version, or to write a checkpoint.

consumes: work, and the callers that wait    waits for: nothing; the orchestrator says when
produces: its result, or its error           tried again should the engine or the trainer process die over it
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.errors import EngineError, EngineLost

_TRIES = 3

T = TypeVar("T")


@dataclass
class _PendingRequest:
    work: Callable[[], Awaitable[Any]]
    done: asyncio.Future[Any]
    tries: int = 0


class PendingRequests:
    def __init__(self) -> None:
        self._open = deque[_PendingRequest]()

    def __bool__(self) -> bool:
        return bool(self._open)

    def put(self, work: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._open.append(_PendingRequest(work, done))
        return done

    async def grant(self) -> None:
        """Do all requests, one after the other. Raise EngineLost; the caller gets it if it happened too often."""
        while self._open:
            await self._grant(self._open.popleft())

    def refuse(self, why: str) -> None:
        while self._open:
            if not (done := self._open.popleft().done).done():
                done.set_exception(EngineError(why))

    async def _grant(self, wish: _PendingRequest) -> None:
        if wish.done.done():  # its caller gave up
            return
        try:
            result = await wish.work()
        except EngineLost as error:
            wish.tries += 1
            if wish.tries < _TRIES:
                self._open.append(wish)
            elif not wish.done.done():
                wish.done.set_exception(EngineError(f"{error}; ask again"))
            raise
        except Exception as error:  # noqa: BLE001 - the caller gets every error
            if not wish.done.done():
                wish.done.set_exception(error)
        else:
            if not wish.done.done():
                wish.done.set_result(result)
