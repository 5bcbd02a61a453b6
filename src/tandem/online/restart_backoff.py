"""How often in a row something was lost: before each further try a longer pause, and after too many none."""

from __future__ import annotations

import asyncio

_PAUSE_S, _MOST_PAUSE_S = 0.2, 10.0


class RestartBackoff:
    def __init__(self, most: int) -> None:
        self.count, self.most = 0, most

    @property
    def are_too_many(self) -> bool:
        return self.count > self.most

    async def pause(self) -> None:
        await asyncio.sleep(min(_PAUSE_S * 2 ** min(self.count - 1, 10), _MOST_PAUSE_S))
