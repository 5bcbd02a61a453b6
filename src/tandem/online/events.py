"""Events for any number of listeners; a listener that does not keep up loses the oldest, never the newest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

_KEPT = 1000


@dataclass(frozen=True)
class Event:
    number: int
    kind: str
    """job, progress, version, checkpoint"""
    data: Mapping[str, Any]
    ended: bool = False
    """Nothing more comes of this job."""


class Events:
    def __init__(self) -> None:
        self._number = 0
        self._listeners: set[asyncio.Queue[Event | None]] = set()

    def put(self, kind: str, data: Mapping[str, Any], *, ended: bool = False) -> None:
        self._number += 1
        self._put(Event(self._number, kind, data, ended))

    def end(self) -> None:
        """End every listener after its last event."""
        self._put(None)

    def _put(self, event: Event | None) -> None:
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

    async def listen(self) -> AsyncIterator[Event]:
        """From now on."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue(_KEPT)
        self._listeners.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.discard(queue)
