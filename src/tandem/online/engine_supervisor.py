"""Whether the engine lives; and another start of it where it does not.

consumes: what is heard of it, and its own `lost`     waits for: a start
produces: the engine again, of no version yet          an error once it was lost too often in a row
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from tandem.errors import EngineError, EngineLost, TandemError
from tandem.protocols import Engine

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
_PAUSE_S, _MOST_PAUSE_S = 0.2, 10.0

Revive = Callable[[], Awaitable[None]]


class RestartBackoff:
    def __init__(self, most: int) -> None:
        self.count, self.most = 0, most

    @property
    def are_too_many(self) -> bool:
        return self.count > self.most

    async def pause(self) -> None:
        await asyncio.sleep(min(_PAUSE_S * 2 ** min(self.count - 1, 10), _MOST_PAUSE_S))


class EngineSupervisor:
    def __init__(self, engine: Engine, revive: Revive | None, most: int, when_lost: Callable[[], None]) -> None:
        """`revive` starts it again; None: it is a part of this process, and ends with it. `most`: losses in a row."""
        self.why_lost = ""
        self._engine, self._revive, self._when_lost = engine, revive, when_lost
        self._restarts, self._losses = 0, RestartBackoff(most)
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._revive is not None:
            self._watching = asyncio.create_task(self._watch(), name="the engine's watch")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        return {"alive": not self.why_lost, "restarts": self._restarts, "why": self.why_lost}

    def served(self) -> None:
        """A version was proven: what was lost before counts no more."""
        self._losses.count = 0

    def is_to_blame(self, error: TandemError) -> bool:
        """For what went wrong; and it can be helped."""
        return isinstance(error, EngineLost) and self._revive is not None

    async def lost(self, error: TandemError) -> None:
        """Returns when it may be tried again."""
        self._is_lost(str(error))
        self._losses.count += 1
        if self._losses.are_too_many:
            raise EngineError(f"online: the engine was lost {self._losses.count} times in a row: {error}")
        await self._losses.pause()

    async def ensure(self) -> None:
        if not self.why_lost or self._revive is None:
            return
        self._restarts += 1
        try:
            await self._revive()
        except (TandemError, OSError) as error:
            raise EngineLost(f"online: the engine could not be started again: {error}") from error
        self.why_lost = ""

    async def _watch(self) -> None:
        while True:
            await self._engine.lost()
            self._is_lost("its process ended")
            while self.why_lost:
                await asyncio.sleep(_LOOK_S)

    def _is_lost(self, why: str) -> None:
        if not self.why_lost:
            _log.error("the engine was lost: %s", why)
            self.why_lost = why
            self._when_lost()
