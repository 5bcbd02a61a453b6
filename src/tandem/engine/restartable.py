"""An engine that restarts after it was lost; callers keep using the same object.

consumes: calls of an Engine             waits for: a start, when `start_again` is called
produces: the same calls, to the engine that runs now. After `lost`, the caller calls `start_again`; the new engine has
its first weights until a version is loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from tandem.errors import EngineLost, TandemError
from tandem.protocols import DigestedEngine, OnToken, WeightSource, why_not_sampled
from tandem.types import Completion, Fingerprints, Sampling, Served

_log = logging.getLogger(__name__)


Under = Callable[[Callable[[], None]], None]
"""Called with a function that aborts the start, as soon as there is something to abort."""


class RestartableEngine:
    def __init__(self, first: DigestedEngine, start: Callable[[Under], DigestedEngine]) -> None:
        """`start` blocks until a new engine is ready or the start is aborted."""
        self._now, self._start = first, start
        self._is_new = False
        """Whether it restarted and no version is loaded yet."""
        self._end_start: Callable[[], None] = lambda: None
        self._closed = False

    @property
    def version(self) -> int:
        return self._now.version

    @property
    def receivers(self) -> int:
        return self._now.receivers

    async def start_again(self) -> None:
        """Close the old engine and start a new one. The old one may hang and hold memory that the new one needs."""
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
            raise EngineLost("engine: it was lost and is restarting; no version is loaded yet")
        return await self._now.generate(prompt_ids, sampling, session=session, on_token=on_token)

    def why_not(self, sampling: Sampling) -> str:
        return why_not_sampled(self._now, sampling)

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
        """Close the engine. The thread of a start cannot be stopped, so abort the start that it waits for."""
        self._closed = True
        self._end_start()
        await self._now.close()
