"""Limit the time in which an engine in another process sends nothing.

A queued request does not mean a silent engine, and neither does an event loop that a training step blocks. So silence
is `limit_s` without a byte for any request. It is counted in quarters, and a long block counts as one quarter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tandem.errors import EngineSilent


class SilenceDeadline:
    def __init__(self, limit_s: float, whose: str) -> None:
        self._limit_s, self._whose = limit_s, whose
        self._heard = self._seen = self._quiet = 0
        self._listening: set[asyncio.Timeout] = set()
        self._next_look: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        """Note that the engine sent something, for any request."""
        self._heard += 1

    @asynccontextmanager
    async def limit(self) -> AsyncGenerator[None]:
        """Raise EngineSilent after the limit without a byte."""
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                if not self._listening:
                    self._quiet, self._seen = 0, self._heard
                    self._look_later()
                self._listening.add(timeout)
                try:
                    yield
                finally:
                    self._listening.discard(timeout)
                    if not self._listening and self._next_look is not None:
                        self._next_look.cancel()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise EngineSilent(
                f"{self._whose}: no token for any request within engine.deadline_s = {self._limit_s:g} s"
            ) from None

    def _look_later(self) -> None:
        self._next_look = asyncio.get_running_loop().call_later(self._limit_s / 4, self._look)

    def _look(self) -> None:
        self._quiet = self._quiet + 1 if self._heard == self._seen else 0
        self._seen = self._heard
        if self._quiet == 4:
            self._quiet = 0
            for timeout in self._listening:
                timeout.reschedule(asyncio.get_running_loop().time())
        self._look_later()
