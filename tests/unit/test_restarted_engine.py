"""An engine whose process is started again, and one whose server ends meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tandem.engine.null import NullEngine
from tandem.engine.restartable import RestartableEngine, Under
from tandem.errors import EngineError


class Engine(NullEngine):
    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


class Start:
    """Of an engine that takes a minute, or is ended before."""

    def __init__(self, *, quick: bool = False) -> None:
        self.begun, self.ended, self.quick = threading.Event(), threading.Event(), quick
        self.made = Engine()

    def __call__(self, under_way: Under) -> Engine:
        under_way(self.ended.set)
        self.begun.set()
        if not self.quick and self.ended.wait(60):
            raise EngineError("engine: vLLM ended while it started")
        return self.made


@pytest.mark.parametrize("given_up", [False, True])
def test_one_that_is_closed_while_it_is_started_again_ends_at_once(given_up: bool) -> None:
    """Also where whoever asked for the start is gone by then."""

    async def work() -> None:
        start = Start()
        engine = RestartableEngine(Engine(), start)
        starting = asyncio.ensure_future(engine.start_again())
        await asyncio.to_thread(start.begun.wait, 5)
        if given_up:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await engine.close()
        with pytest.raises(asyncio.CancelledError if given_up else EngineError):
            await starting

    started = time.monotonic()
    asyncio.run(work())  # waits for the thread
    assert time.monotonic() - started < 5


def test_a_start_that_begins_after_the_end_is_ended_as_soon_as_there_is_something_to_end() -> None:
    async def work() -> None:
        start = Start()
        engine = RestartableEngine(Engine(), start)
        await engine.close()
        with pytest.raises(EngineError, match="ended while it started"):
            await engine.start_again()

    asyncio.run(work())


def test_one_that_was_started_again_is_closed_in_order() -> None:
    async def work() -> None:
        first, start = Engine(), Start(quick=True)
        engine = RestartableEngine(first, start)
        await engine.start_again()
        await engine.close()
        assert (first.closed, start.made.closed, start.ended.is_set()) == (1, 1, False)

    asyncio.run(work())
