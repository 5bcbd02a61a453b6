"""Idempotent calls: one at a time per key, finished even if the caller leaves, on disk before they return."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from tandem.io.request_key import RequestKey
from tandem.io.sqlite_store import Durable
from tandem.rollout.queue import tables

_log = logging.getLogger(__name__)

T = TypeVar("T")


class IdempotentCalls:
    def __init__(self, db: Durable, keep_s: float) -> None:
        self._db, self._keep_s = db, keep_s
        self._locked: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def one_at_a_time(self, once: RequestKey | None) -> AsyncGenerator[Any]:
        """Yield the earlier reply to a request with this key, or None. Other requests with the key wait."""
        if once is None:
            yield None
            return
        while once.key in self._locked:
            await asyncio.wait([self._locked[once.key]])
        mine = self._lock(once.key)
        try:
            yield tables.answered(self._db, once)
        finally:
            self._unlock(once.key, mine)

    async def run_to_end(self, work: Coroutine[Any, Any, T], *, once: RequestKey | None = None) -> T:
        """Run `work` to its end even if the caller is cancelled, so that memory and disk stay equal. `once`: the key
        that the caller has locked; it stays locked until `work` ends."""
        task = self._start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if once is not None and not task.done():
                held = self._lock(once.key)
                task.add_done_callback(lambda _: self._unlock(once.key, held))
            raise

    async def write(
        self, change: Callable[[sqlite3.Connection], T], once: RequestKey | None = None, reply: Any = None
    ) -> T:
        """Write the change and the reply to its key in one transaction."""

        def both(db: sqlite3.Connection) -> T:
            result = change(db)
            if once is not None:
                tables.remember(db, once, reply, self._keep_s)
            return result

        return await self._db.write(both)

    def write_later(
        self, change: Callable[[sqlite3.Connection], None], then: Callable[[], None] = lambda: None
    ) -> None:
        """Write a change that no caller waits for. After a crash the queue would derive it again. `then` runs once it
        is on disk."""

        async def work() -> None:
            await self.write(change)
            then()

        self._start(work()).add_done_callback(_log_failure)

    async def finish(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _lock(self, key: str) -> asyncio.Future[None]:
        self._locked[key] = asyncio.get_running_loop().create_future()
        return self._locked[key]

    def _unlock(self, key: str, held: asyncio.Future[None]) -> None:
        if self._locked.get(key) is held:
            del self._locked[key]
        held.set_result(None)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("a background write of the rollout queue failed: %s", error)
