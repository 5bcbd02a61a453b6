"""One version for all engines of a pool, or none: who cannot take what others took is left out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pool_script import Script, Source, ask, bring_up, play, settle

from tandem.engine.pool import EnginePool
from tandem.errors import EngineLost, SyncError, TandemError
from tandem.types import Sampling, Served


def test_who_cannot_take_a_version_that_others_took_is_left_out() -> None:
    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        await bring_up(pool, 1)
        one.answering.clear()
        waiting = ask(pool, session="mine")
        await settle()
        one.refuses = SyncError("what arrived is not what was sent")
        served = await pool.load(2)
        assert (served.engines, served.fingerprints, pool.version) == (("other",), {"a": "2"}, 2)
        assert (await waiting).versions == [2], "it is asked again where the version is"
        for _ in range(4):
            assert (await pool.generate([1], Sampling())).versions == [2]
        await asyncio.wait_for(pool.lost(), 10)
        await pool.close()

    play(scenario)


def test_when_nobody_could_take_a_version_all_go_on_with_the_one_before() -> None:
    async def scenario() -> None:
        engines = [Script("one"), Script("other")]
        pool = EnginePool(engines)
        await bring_up(pool, 1)
        for engine in engines:
            engine.refuses = SyncError("what arrived is not what was sent")
        with pytest.raises(SyncError, match="not what was sent"):
            await pool.load(2)
        assert [(await pool.generate([1], Sampling())).versions for _ in range(4)] == [[1]] * 4
        for engine in engines:
            engine.refuses = None
        assert (await bring_up(pool, 2)).engines == ("one", "other")
        await pool.close()

    play(scenario)


def test_when_all_are_lost_as_they_load_that_is_the_error() -> None:
    async def scenario() -> None:
        engines = [Script("one"), Script("other")]
        pool = EnginePool(engines)
        await bring_up(pool, 1)
        for engine in engines:
            engine.die()
        with pytest.raises(EngineLost, match="is gone"):
            await pool.load(2)
        with pytest.raises(EngineLost, match="no engine is left"):
            await pool.load(2)
        await pool.close()

    play(scenario)


def test_a_load_that_is_given_up_leaves_out_who_had_not_done_it() -> None:
    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        await bring_up(pool, 1)
        one.loading.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await pool.load(2)
        assert (pool.receivers, pool.version) == (1, 2)
        one.loading.set()
        assert (await pool.load(2)).engines == ("other",)
        await pool.close()

    play(scenario)


def test_a_load_that_is_given_up_before_anybody_did_it_changes_nothing() -> None:
    async def scenario() -> None:
        engines = [Script("one"), Script("other")]
        pool = EnginePool(engines)
        await bring_up(pool, 1)
        for engine in engines:
            engine.loading.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await pool.load(2)
        assert (await pool.generate([1], Sampling())).versions == [1]
        assert pool.receivers == 2
        await pool.close()

    play(scenario)


def test_once_an_engine_is_lost_the_others_do_not_wait_for_it_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As over `broadcast`, which gives a version to all engines or to none."""

    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        await bring_up(pool, 1)
        for engine in (one, other):
            engine.loading.clear()
        loading = asyncio.ensure_future(pool.load(2))
        await settle()
        other.die()
        with pytest.raises(EngineLost, match="other"):
            await asyncio.wait_for(loading, 10)
        assert pool.receivers == 1
        assert (await pool.generate([1], Sampling())).versions == [1]
        one.loading.set()
        assert (await bring_up(pool, 2)).engines == ("one",)
        await pool.close()

    monkeypatch.setattr("tandem.engine.pool.OTHERS_HAVE_S", 0.05)
    play(scenario)


def test_an_engine_that_loads_while_another_is_lost_gets_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        await bring_up(pool, 1)
        one.loading.clear()
        other.die()
        loading = asyncio.ensure_future(pool.load(2))
        await settle()
        one.loading.set()
        assert (await loading).engines == ("one",)
        await pool.close()

    monkeypatch.setattr("tandem.engine.pool.OTHERS_HAVE_S", 10.0)
    play(scenario)


def test_engines_that_differ_and_say_that_they_agree_are_asked_nothing() -> None:
    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        await bring_up(pool, 1)

        async def other_weights(version: int) -> Served:
            return Served(version, {"a": "another"}, ("other",), 9)

        other.load = other_weights
        with pytest.raises(SyncError, match="different weights"):
            await pool.load(2)
        with pytest.raises(EngineLost, match="no engine is left"):
            await pool.sleep()
        await pool.close()

    play(scenario)


def test_what_attaching_again_cannot_cure_is_the_pool_s_error_whatever_else_failed() -> None:
    """Another trainer has taken one of them over: it must not be taken back from that one."""

    async def scenario() -> None:
        one, other, third = engines = [Script("one"), Script("other"), Script("third")]
        pool = EnginePool(engines)
        await bring_up(pool, 1)
        other.refuses = TandemError("another trainer has attached since")
        with pytest.raises(TandemError, match="another trainer"):
            await pool.load(2)
        one.die()

        async def fenced(source: Any) -> None:
            raise TandemError("another trainer has attached since")

        third.attach = fenced
        with pytest.raises(TandemError, match="another trainer"):
            await pool.attach(Source())  # pyright: ignore
        await pool.close()

    play(scenario)


def test_an_engine_that_proves_another_version_is_left_out() -> None:
    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        await bring_up(pool, 1)

        async def stale(version: int) -> Served:
            return Served(1, {"a": "1"}, ("other",), 9)

        other.load = stale
        assert (await pool.load(2)).engines == ("one",)
        await pool.close()

    play(scenario)
