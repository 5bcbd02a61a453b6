"""Watch the engine, and restart it when it dies.

consumes: errors of its calls, and its `lost()`        waits for: a restart
produces: a restarted engine, without a version yet    an error after too many losses in a row
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from tandem.errors import EngineError, EngineLost, TandemError
from tandem.protocols import Engine

_log = logging.getLogger(__name__)

_POLL_S = 0.2
_PAUSE_S, _MAX_PAUSE_S = 0.2, 10.0

Restart = Callable[[], Awaitable[None]]


class RestartBackoff:
    """Count losses in a row, and wait longer before each further restart."""

    def __init__(self, limit: int) -> None:
        self.count, self.limit = 0, limit

    @property
    def exceeded(self) -> bool:
        return self.count > self.limit

    async def pause(self) -> None:
        await asyncio.sleep(min(_PAUSE_S * 2 ** min(self.count - 1, 10), _MAX_PAUSE_S))


class EngineSupervisor:
    def __init__(self, engine: Engine, restart: Restart | None, max_losses: int, on_lost: Callable[[], None]) -> None:
        """`restart` starts the engine again; None: it runs inside this process and ends with it. `max_losses`: how many
        losses in a row are followed by a restart."""
        self.why_lost = ""
        self._engine, self._restart, self._on_lost = engine, restart, on_lost
        self._restarts, self._losses = 0, RestartBackoff(max_losses)
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._restart is not None:
            self._watching = asyncio.create_task(self._watch(), name="engine supervisor")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        return {"alive": not self.why_lost, "restarts": self._restarts, "why": self.why_lost}

    def served(self) -> None:
        """A version was proven: earlier losses count no more."""
        self._losses.count = 0

    def can_recover(self, error: TandemError) -> bool:
        """Return whether the engine caused this error and can be restarted."""
        return isinstance(error, EngineLost) and self._restart is not None

    async def lost(self, error: TandemError) -> None:
        """Record a loss and wait before the restart. EngineError after too many losses in a row."""
        self._mark_lost(str(error))
        self._losses.count += 1
        if self._losses.exceeded:
            raise EngineError(
                f"online: the engine was lost {self._losses.count} times in a row, and max_restarts = "
                f"{self._losses.limit}: {error}"
            )
        await self._losses.pause()

    async def ensure(self) -> None:
        """Restart the engine if it is lost."""
        if not self.why_lost or self._restart is None:
            return
        self._restarts += 1
        try:
            await self._restart()
        except (TandemError, OSError) as error:
            raise EngineLost(f"online: restarting the engine failed: {error}") from error
        self.why_lost = ""

    async def _watch(self) -> None:
        while True:
            await self._engine.lost()
            self._mark_lost("its process ended")
            while self.why_lost:
                await asyncio.sleep(_POLL_S)

    def _mark_lost(self, why: str) -> None:
        if not self.why_lost:
            _log.error("the engine was lost: %s", why)
            self.why_lost = why
            self._on_lost()
