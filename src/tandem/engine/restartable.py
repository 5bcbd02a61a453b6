"""An engine that restarts after it was lost; callers keep using the same object.

consumes: what an Engine does            waits for: a start, when it is asked for one
produces: the same; `start_again` after `lost`. What it then has are its first weights, until a version is loaded
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from tandem.errors import EngineLost, TandemError
from tandem.protocols import DigestedEngine, OnToken, WeightSource
from tandem.types import Completion, Fingerprints, Sampling, Served

_log = logging.getLogger(__name__)


Under = Callable[[Callable[[], None]], None]
"""Hears, as soon as there is something to end, how a start that is under way is ended before its time."""


class RestartableEngine:
    def __init__(self, first: DigestedEngine, start: Callable[[Under], DigestedEngine]) -> None:
        """`start` blocks until another one is ready, or until it is ended."""
        self._now, self._start = first, start
        self._is_new = False
        """Started again, and no version loaded yet."""
        self._end_start: Callable[[], None] = lambda: None
        self._closed = False

    @property
    def version(self) -> int:
        return self._now.version

    @property
    def receivers(self) -> int:
        return self._now.receivers

    async def start_again(self) -> None:
        """In place of the one before, which is ended first: it may hang, and hold memory that is needed."""
        with suppress(TandemError, OSError):
            await self._now.close()
        self._is_new = True
        await asyncio.to_thread(self._start_now)
        _log.info("the engine was started again")

    def _start_now(self) -> None:
        """Run the start to its end, even if its caller was cancelled."""
        try:
            self._now = self._start(self._under_way)
        finally:
            self._end_start = lambda: None

    def _under_way(self, end: Callable[[], None]) -> None:
        self._end_start = end
        if self._closed:
            end()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        if self._is_new:
            raise EngineLost("engine: it was lost and is started again; no version is loaded yet")
        return await self._now.generate(prompt_ids, sampling, session=session, on_token=on_token)

    async def attach(self, source: WeightSource) -> None:
        await self._now.attach(source)

    async def load(self, version: int) -> Served:
        served = await self._now.load(version)
        self._is_new = False
        return served

    async def fingerprints(self) -> Fingerprints:
        return await self._now.fingerprints()

    async def sleep(self) -> None:
        await self._now.sleep()

    async def wake(self) -> None:
        await self._now.wake()

    async def lost(self) -> None:
        await self._now.lost()

    async def close(self) -> None:
        """A start takes a minute, and its thread cannot be ended: so what it waits for is."""
        self._closed = True
        self._end_start()
        await self._now.close()
