"""A lost engine is found: its process starts beside whatever waits for the other engines."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_engine_process import SHORT, Source, closing, command, owned, pid_of, play

from stopwatch import Stopwatch
from tandem.engine.pool import EnginePool
from tandem.engine.server.child_process import Owned
from tandem.engine.server.engine import ServerEngine
from tandem.errors import EngineError


class HeldBack:
    """Command lines of engines. A start waits while `go_on` is cleared."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()

    def command(self, model: str, version: int, ready_file: Path) -> list[str]:
        assert self.go_on.wait(60)
        return command(model, version, ready_file)


@pytest.fixture
def held() -> Iterator[HeldBack]:
    made = HeldBack()
    yield made
    made.go_on.set()


async def killed(engine: ServerEngine, directory: Path) -> None:
    """Its process gets SIGKILL, and it is known to be lost."""
    os.kill(pid_of(directory), signal.SIGKILL)
    await engine.lost()


def test_a_killed_engine_of_a_pool_starts_at_once_while_the_other_gets_versions(tmp_path: Path, held: HeldBack) -> None:
    async def work() -> None:
        homes = [tmp_path, tmp_path / "other"]  # both may read the second
        places = [Owned(held.command, str(tmp_path), home, start_deadline_s=30, max_restarts=1) for home in homes]
        pool, source = EnginePool([ServerEngine(place, deadline_s=10) for place in places]), Source(homes[1])
        try:
            await pool.attach(source)
            assert len((await pool.load(7)).engines) == 2
            held.go_on.clear()
            os.kill(pid_of(homes[0]), signal.SIGKILL)
            await pool.lost()
            with Stopwatch() as watch:
                await pool.attach(source)
                assert len((await pool.load(8)).engines) == 1
                assert (await pool.generate([1], SHORT)).versions == [8] * 5
            assert watch.seconds < 5, "it waited for the engine that starts"
            back = asyncio.create_task(pool.lost())
            await asyncio.sleep(0.3)
            assert not back.done()
            held.go_on.set()
            await asyncio.wait_for(back, 20)
            await pool.attach(source)
            assert len((await pool.load(9)).engines) == 2, "it was started once: max_restarts is 1"
        finally:
            held.go_on.set()
            await pool.close()

    play(work)


def test_an_engine_without_a_trainer_is_found_each_time_that_it_is_lost(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(owned(tmp_path)) as engine:
            for starts in range(3):
                assert (await engine.generate([1], SHORT)).versions == [0] * 5, starts
                await killed(engine, tmp_path)
                await engine.found()

    play(work)


def test_a_lost_engine_that_cannot_start_again_says_so_where_it_is_attached(tmp_path: Path) -> None:
    async def work() -> None:
        async with closing(owned(tmp_path, max_restarts=0)) as engine:
            source = Source(tmp_path)
            await engine.attach(source)
            await killed(engine, tmp_path)
            await engine.found()
            with pytest.raises(EngineError, match=r"max_restarts = 0 restarts.*signal 9"):
                await engine.attach(source)

    play(work)


def test_an_attach_that_is_cancelled_leaves_the_start_that_it_waited_for_to_the_next_one(
    tmp_path: Path, held: HeldBack
) -> None:
    async def work() -> None:
        place = Owned(held.command, str(tmp_path), tmp_path, start_deadline_s=30, max_restarts=1)
        async with closing(ServerEngine(place, deadline_s=10)) as engine:
            source = Source(tmp_path)
            await engine.attach(source)
            await killed(engine, tmp_path)
            held.go_on.clear()
            finding = asyncio.create_task(engine.found())
            attaching = asyncio.create_task(engine.attach(source))
            await asyncio.sleep(0.3)
            attaching.cancel()
            await asyncio.wait([attaching])
            assert attaching.cancelled()
            assert not finding.done()
            held.go_on.set()
            await engine.attach(source)  # it was started once: max_restarts is 1
            await finding

    play(work)


def test_a_lost_engine_starts_when_its_caller_has_made_room(tmp_path: Path) -> None:
    rooms = list[bool]()

    def noted(model: str, version: int, ready_file: Path) -> list[str]:
        rooms.append(False)
        return command(model, version, ready_file)

    async def work() -> None:
        place = Owned(noted, str(tmp_path), tmp_path, start_deadline_s=30)
        async with closing(ServerEngine(place, deadline_s=10, make_room=lambda: rooms.append(True))) as engine:
            await engine.attach(Source(tmp_path))
            await killed(engine, tmp_path)
            rooms.clear()
            await engine.found()
            assert rooms == [True, False]

    play(work)
