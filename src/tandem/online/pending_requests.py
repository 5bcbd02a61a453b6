"""Requests that wait for the gap between two jobs: to activate a version, or to write a checkpoint.

consumes: work, and the callers that wait    waits for: nothing; the orchestrator says when
produces: its result, or its error           retried if the engine or the trainer process dies meanwhile
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

    async def run_all(self) -> None:
        """Run all requests, one after the other. EngineLost is raised here, and the request is tried again later; after
        _TRIES times its caller gets the error, too."""
        while self._open:
            await self._run(self._open.popleft())

    def refuse_all(self, why: str) -> None:
        """Fail all waiting requests."""
        while self._open:
            if not (done := self._open.popleft().done).done():
                done.set_exception(EngineError(why))

    async def _run(self, request: _PendingRequest) -> None:
        if request.done.done():  # its caller gave up
            return
        try:
            result = await request.work()
        except EngineLost as error:
            request.tries += 1
            if request.tries < _TRIES:
                self._open.append(request)
            elif not request.done.done():
                request.done.set_exception(EngineError(f"{error}; send the request again"))
            raise
        except Exception as error:  # noqa: BLE001 - the caller gets every error
            if not request.done.done():
                request.done.set_exception(error)
        else:
            if not request.done.done():
                request.done.set_result(result)
