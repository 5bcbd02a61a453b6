"""Calls of the rollout queue: one at a time with a key, each carried to its end, on the disk before it returns."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from tandem.io.request_key import RequestKey
from tandem.io.sqlite_store import Durable
from tandem.rollout.queue import tables as rows

_log = logging.getLogger(__name__)

T = TypeVar("T")


class IdempotentCalls:
    def __init__(self, db: Durable, keep_s: float) -> None:
        self._db, self._keep_s = db, keep_s
        self._under_way: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def turn(self, once: RequestKey | None) -> AsyncGenerator[Any]:
        """Yields what a request with this key was answered before, or None; others with the key wait meanwhile."""
        if once is None:
            yield None
            return
        while once.key in self._under_way:
            await asyncio.wait([self._under_way[once.key]])
        mine = self._hold(once.key)
        try:
            yield rows.answered(self._db, once)
        finally:
            self._let_go(once.key, mine)

    async def whole(self, work: Coroutine[Any, Any, T], *, once: RequestKey | None = None) -> T:
        """To its end, even if the caller is cancelled: what was decided is written, and applied when it is. `once`:
        the key whose turn the caller has, and which stays held until then."""
        task = self._start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if once is not None and not task.done():
                held = self._hold(once.key)
                task.add_done_callback(lambda _: self._let_go(once.key, held))
            raise

    async def write(
        self, change: Callable[[sqlite3.Connection], T], once: RequestKey | None = None, reply: Any = None
    ) -> T:
        """The change, and the reply that its key is answered with from now on: both or neither."""

        def both(db: sqlite3.Connection) -> T:
            result = change(db)
            if once is not None:
                rows.remember(db, once, reply, self._keep_s)
            return result

        return await self._db.write(both)

    def later(self, change: Callable[[sqlite3.Connection], None], then: Callable[[], None] = lambda: None) -> None:
        """Nobody waits for it: lost in a crash, it would be found out again. `then`: once it is on the disk."""

        async def work() -> None:
            await self.write(change)
            then()

        self._start(work()).add_done_callback(_log_failure)

    async def end(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _hold(self, key: str) -> asyncio.Future[None]:
        self._under_way[key] = asyncio.get_running_loop().create_future()
        return self._under_way[key]

    def _let_go(self, key: str, held: asyncio.Future[None]) -> None:
        if self._under_way.get(key) is held:
            del self._under_way[key]
        held.set_result(None)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("what nobody waits for is not written yet: %s", error)
