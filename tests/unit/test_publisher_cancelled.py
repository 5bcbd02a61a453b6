"""The engine loads while the trainer sends: if one of the two ends, the other is not left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.errors import EngineLost, SyncError
from tandem.publish import Publisher, on_this_thread
from tandem.types import Weights

WEIGHTS = Weights(1, "adapter", lambda: iter(()))


class Engine:
    version, receivers = 0, 1

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.loading, self.asked = refuses, 0, 0

    async def load(self, version: int) -> Any:
        self.loading, self.asked = self.loading + 1, self.asked + 1
        try:
            if self.refuses:
                raise EngineLost(self.refuses)
            await asyncio.sleep(30)
        finally:
            self.loading -= 1


class Bridge:
    mode, carries = "x", "adapter"

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.sent = refuses, 0

    def send(self, weights: Weights) -> Any:
        self.sent += 1
        if self.refuses:
            raise SyncError(self.refuses)


def meeting(engine: Engine, bridge: Bridge, **options: Any) -> Any:
    publisher: Any = Publisher(bridge, engine, **options)  # pyright: ignore[reportArgumentType]
    return publisher._transfer(WEIGHTS)


@pytest.mark.parametrize("turns", range(1, 9))
def test_whenever_it_is_cancelled_no_load_is_left_running(turns: int):
    async def check() -> None:
        engine, bridge = Engine(), Bridge()
        meets = asyncio.ensure_future(meeting(engine, bridge))
        for _ in range(turns):
            await asyncio.sleep(0)
        meets.cancel()
        with pytest.raises(asyncio.CancelledError):
            await meets
        assert engine.loading == 0

    asyncio.run(check())


def test_what_an_engine_refuses_at_once_is_not_sent():
    async def check() -> None:
        engine, bridge = Engine("no engine is left"), Bridge()
        with pytest.raises(EngineLost, match="no engine is left"):
            await meeting(engine, bridge)
        assert (engine.loading, bridge.sent) == (0, 0)

    asyncio.run(check())


@pytest.mark.parametrize("options", [{}, {"call": on_this_thread}])
def test_what_the_trainer_refuses_is_waited_for_by_nobody(options: dict[str, Any]):
    async def check() -> None:
        engine, bridge = Engine(), Bridge("it holds what is no number")
        with pytest.raises(SyncError, match="no number"):
            await asyncio.wait_for(meeting(engine, bridge, **options), 5)
        assert engine.loading == 0
        assert engine.asked == (0 if options else 1)

    asyncio.run(check())
