"""Several engines as one: who is asked, who is left out, who is taken back; and that no two versions serve as one."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest
from pool_script import Script, Source, Tells, ask, bring_up, play, settle

from stopwatch import Stopwatch
from tandem.engine import pool as pool_module
from tandem.engine.pool import EnginePool
from tandem.errors import EngineError, EngineLost, EngineSilent, SyncError
from tandem.types import Sampling, Served

# --- who is asked


def test_requests_go_to_the_least_busy() -> None:
    async def scenario() -> None:
        one, other = engines = [Script("one"), Script("other")]
        pool = EnginePool(engines)
        for engine in engines:
            engine.answering.clear()
        waiting = [ask(pool) for _ in range(6)]
        await settle()
        assert [engine.asked for engine in engines] == [3, 3]
        other.answering.set()
        await settle()
        other.answering.clear()
        waiting += [ask(pool) for _ in range(3)]
        await settle()
        assert [engine.asked for engine in engines] == [3, 6]
        one.answering.set()
        other.answering.set()
        await asyncio.gather(*waiting)
        await pool.close()

    play(scenario)


def test_a_session_stays_with_its_engine_until_that_is_lost_and_then_with_another() -> None:
    async def scenario() -> None:
        one, other = engines = [Script("one"), Script("other")]
        pool = EnginePool(engines)
        for engine in engines:
            engine.answering.clear()
        waiting = [ask(pool, session="mine") for _ in range(4)]
        await settle()
        assert [engine.asked for engine in engines] == [4, 0], "its prefix is cached there"
        one.die()
        await settle()
        assert [engine.asked for engine in engines] == [4, 4]
        waiting.append(ask(pool, session="mine"))
        other.answering.set()
        await asyncio.gather(*waiting)
        assert other.asked == 5
        await pool.close()

    play(scenario)


def test_sessions_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SESSIONS_KEPT", 10)

    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        for number in range(50):  # all of them where it is least busy: with the first one
            await pool.generate([1], Sampling(), session=f"{number}")
            await pool.generate([1], Sampling(), session="kept")
        assert (one.asked, other.asked) == (100, 0)
        one.answering.clear()
        waiting = [ask(pool, session=name) for name in ("kept", "49", "41")]
        await settle()
        assert (one.asked, other.asked) == (103, 0), "these stay, however busy it is"
        waiting.append(ask(pool, session="39"))
        await settle()
        assert (one.asked, other.asked) == (103, 1), "this one was forgotten"
        one.answering.set()
        await asyncio.gather(*waiting)
        await pool.close()

    play(scenario)


# --- who is left out


@pytest.mark.parametrize("error", [EngineLost("gone"), EngineSilent("silent")], ids=["lost", "silent"])
def test_what_a_lost_or_silent_engine_was_asked_is_asked_again_elsewhere(error: EngineError) -> None:
    async def scenario() -> None:
        one, other = Script("one"), Script("other", version=1)
        pool, heard = EnginePool([one, other]), []

        async def fail(*args: Any, on_token: Any, **options: Any) -> Any:
            on_token(3, -1.0, 1)
            raise error

        one.generate = fail  # pyright: ignore
        completion = await pool.generate([1], Sampling(), on_token=lambda *token: heard.append(token[0]))
        assert completion.ids == [7]
        assert heard == [3, 7], "the new ones after the old"
        await pool.generate([1], Sampling())
        assert other.asked == 2
        await pool.close()

    play(scenario)


def test_another_error_is_the_request_s_own() -> None:
    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])

        async def fail(*args: Any, **options: Any) -> Any:
            raise EngineError("too long")

        one.generate = fail  # pyright: ignore
        with pytest.raises(EngineError, match="too long"):
            await pool.generate([1], Sampling())
        assert (other.asked, pool.receivers) == (0, 2)
        await pool.close()

    play(scenario)


def test_what_hangs_on_an_engine_that_the_watch_finds_lost_is_asked_again_at_once() -> None:
    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        gone = asyncio.Event()
        one.lost = gone.wait  # pyright: ignore
        one.answering.clear()  # a stopped process: it neither answers nor breaks the connection
        pool = EnginePool([one, other])
        await bring_up(pool)
        waiting = ask(pool)
        watching = asyncio.create_task(pool.lost())
        await settle()
        assert (one.asked, other.asked) == (1, 0)
        gone.set()
        assert (await asyncio.wait_for(waiting, 10)).ids == [7]
        await asyncio.wait_for(watching, 10)
        await pool.close()

    play(scenario)


def test_a_prompt_that_ends_every_engine_does_not_end_them_for_ever() -> None:
    async def scenario() -> None:
        engine = Script("only")
        asked = 0

        async def fail(*args: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            raise EngineLost("it fell over")

        engine.generate = fail  # pyright: ignore
        pool = EnginePool([engine])
        await bring_up(pool)
        waiting = ask(pool)
        while not waiting.done():
            await pool.lost()
            await bring_up(pool)
            await settle()
        with pytest.raises(EngineLost, match=r"8 engines were lost.*fell over"):
            await waiting
        assert asked == 8
        await pool.close()

    play(scenario)


# --- who is taken back


def test_when_all_are_out_requests_wait_until_one_has_a_version_again() -> None:
    async def scenario() -> None:
        engine = Script("only")
        pool = EnginePool([engine])
        await bring_up(pool)
        engine.die()
        waiting = ask(pool)
        await settle()
        assert not waiting.done()
        with pytest.raises(EngineLost):
            await pool.attach(Source())  # pyright: ignore
        engine.come_back()
        await pool.attach(Source())  # pyright: ignore
        await settle()
        assert (waiting.done(), engine.asked) == (False, 1), "attached, but what it has is no version of ours"
        await pool.load(2)
        assert (await waiting).versions == [2]
        await pool.close()

    play(scenario)


def test_an_engine_that_answers_again_is_told_by_lost_and_counts_at_the_next_meeting() -> None:
    async def scenario() -> None:
        one, other = Tells("one"), Tells("other")
        pool = EnginePool([one, other])
        await bring_up(pool)
        one.die()
        await asyncio.wait_for(pool.lost(), 10)
        assert pool.receivers == 1
        served = await bring_up(pool, 2)
        assert served.engines == ("other",)
        watching = asyncio.create_task(pool.lost())
        await asyncio.sleep(0.02)
        assert not watching.done()
        one.come_back()
        await asyncio.wait_for(watching, 10)
        assert pool.receivers == 2
        assert (await bring_up(pool, 2)).engines == ("one", "other")
        assert (one.ranks, other.ranks) == ([0, 0], [1, 0, 1])
        slow, source = one.unless_dead, Source()

        async def later(wait: Any) -> None:
            await asyncio.sleep(0.01)
            await slow(wait)

        one.unless_dead = later
        await pool.attach(source)  # pyright: ignore
        assert source.replies == ["one", "other"], "in their order, whoever speaks first"
        await pool.close()

    play(scenario)


def test_whom_one_waits_for_as_it_is_attached_is_no_news_when_it_comes() -> None:
    async def scenario() -> None:
        engine = Tells("only")
        pool = EnginePool([engine])
        await bring_up(pool)
        engine.die()
        await pool.lost()
        plain = engine.attach

        async def patient(source: Any) -> None:
            await engine.alive.wait()
            await settle()
            await plain(source)

        engine.attach = patient
        attaching = asyncio.create_task(pool.attach(Source()))  # pyright: ignore
        await settle()
        engine.come_back()
        await attaching
        await pool.load(2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.lost(), 0.05)
        await pool.close()

    play(scenario)


def test_an_attach_that_is_given_up_does_not_end_the_search() -> None:
    async def scenario() -> None:
        one, other = Tells("one"), Tells("other")
        pool = EnginePool([one, other])
        await bring_up(pool)
        for engine in (one, other):
            engine.die()
        await pool.lost()
        await settle()
        plain = one.attach
        one.attach = lambda source: asyncio.Event().wait()  # pyright: ignore
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await pool.attach(Source())  # pyright: ignore
        one.attach = plain
        one.come_back()
        other.come_back()
        await asyncio.wait_for(pool.lost(), 10)
        await bring_up(pool, 2)
        await pool.close()

    play(scenario)


def test_an_engine_that_cannot_say_that_it_is_back_is_tried_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "TRY_AGAIN_S", 0.05)

    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        await bring_up(pool)
        one.die()
        await pool.lost()
        await bring_up(pool)
        one.come_back()
        began = time.monotonic()
        with Stopwatch() as watch:
            await asyncio.wait_for(pool.lost(), 10)
        assert time.monotonic() - began > 0.03
        assert watch.seconds < 0.5
        assert (await bring_up(pool)).engines == ("one", "other")
        await pool.close()

    play(scenario)


def test_an_engine_that_fails_over_and_over_is_tried_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "TRY_AGAIN_S", 0.02)

    async def scenario() -> None:
        one, other = Tells("one"), Tells("other")
        one.refuses = SyncError("its rank is too small")
        pool = EnginePool([one, other])
        tried_at, load = list[float](), one.load

        async def noted(version: int) -> Served:
            tried_at.append(time.monotonic())
            return await load(version)

        one.load = noted
        await bring_up(pool)

        async def keep() -> None:
            while True:
                await pool.lost()
                await bring_up(pool)

        keeping = asyncio.create_task(keep())
        async with asyncio.timeout(10):
            while len(tried_at) < 6:
                await asyncio.sleep(0.005)
        keeping.cancel()
        apart_s = [later - before for before, later in pairwise(tried_at)]
        assert all(0.95 * 0.02 * 2**n < each for n, each in enumerate(apart_s)), apart_s
        await asyncio.gather(keeping, return_exceptions=True)
        await pool.close()

    play(scenario)


def test_where_nobody_publishes_an_engine_that_answers_again_is_asked_again() -> None:
    async def scenario() -> None:
        one = Tells("one")
        pool = EnginePool([one])
        one.die()
        waiting = ask(pool)
        await settle()
        one.come_back()
        one.version = 5  # a judge: it has what it always has
        one.gone.clear()
        assert (await asyncio.wait_for(waiting, 10)).versions == [5]
        await pool.close()

    play(scenario)


def test_what_is_heard_late_of_an_earlier_life_says_nothing_about_this_one() -> None:
    async def scenario() -> None:
        one = Script("one")
        pool, slow = EnginePool([one]), asyncio.Event()

        async def stubborn(*args: Any, **options: Any) -> Any:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await slow.wait()  # closing what it had open takes its time
                raise EngineLost("the connection of an hour ago broke") from None

        await bring_up(pool)
        plain, one.generate = one.generate, stubborn  # pyright: ignore
        waiting = ask(pool)
        await settle()
        one.generate = plain
        one.die()
        await pool.lost()
        one.come_back()
        await bring_up(pool, 2)
        slow.set()
        assert (await waiting).versions == [2]
        assert (await asyncio.wait_for(ask(pool), 1)).versions == [2], "it is not left out once more"
        await pool.close()

    play(scenario)


def test_who_joins_while_somebody_listens_is_watched_too() -> None:
    async def scenario() -> None:
        one, other = Tells("one"), Tells("other")
        pool = EnginePool([one, other])
        one.die()
        with pytest.raises(EngineLost):
            await pool.attach(Source())  # pyright: ignore
        await bring_up(pool)
        watching = asyncio.create_task(pool.lost())
        await settle()
        pool._move(pool._members[0], "due")  # found, and taken along by somebody who was about to publish anyway
        one.come_back()
        await bring_up(pool)
        await settle()
        assert not watching.done()
        one.die()
        await asyncio.wait_for(watching, 10)
        await pool.close()

    play(scenario)


def test_an_engine_that_was_started_anew_unnoticed_is_asked_nothing_before_it_has_a_version() -> None:
    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        await bring_up(pool, 1)
        one.die()
        one.come_back()
        await pool.attach(Source())  # pyright: ignore
        for _ in range(4):
            assert (await pool.generate([1], Sampling())).versions == [1]
        assert (one.asked, other.asked) == (0, 4)
        assert (await pool.load(2)).engines == ("one", "other")
        await pool.close()

    play(scenario)


def test_nor_while_another_engine_is_still_being_attached() -> None:
    class Slow(Script):
        async def attach(self, source: Any) -> None:
            await may_go_on.wait()
            await super().attach(source)

    async def scenario() -> None:
        one, other = Script("one"), Slow("other")
        pool = EnginePool([one, other])
        may_go_on.set()
        await bring_up(pool, 1)
        may_go_on.clear()
        one.die()
        one.come_back()
        attaching = asyncio.create_task(pool.attach(Source()))  # pyright: ignore
        await settle()
        assert one.attaches == 2
        for _ in range(4):
            assert (await pool.generate([1], Sampling())).versions == [1]
        assert (one.asked, other.asked) == (0, 4)
        may_go_on.set()
        await attaching
        await pool.close()

    may_go_on = asyncio.Event()
    play(scenario)


# --- sleep, and the end


def test_sleep_leaves_out_who_is_gone_and_fails_when_nobody_is_left() -> None:
    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        await bring_up(pool, 1)
        one.die()
        await pool.sleep()
        await pool.wake()
        assert pool.receivers == 1
        other.die()
        with pytest.raises(EngineLost, match="no engine is left"):
            await pool.sleep()
        await pool.close()

    play(scenario)


def test_closing_ends_whoever_waits_for_an_engine() -> None:
    async def scenario() -> None:
        one = Script("one")
        pool = EnginePool([one])
        await bring_up(pool, 1)
        one.die()
        waiting = ask(pool)
        await settle()
        await pool.close()
        with pytest.raises(EngineError, match="closed"):
            await waiting

    play(scenario)


def test_a_pool_is_coming_while_nobody_could_answer_and_somebody_is_taken_back():
    async def work() -> None:
        engines = [Script("one"), Script("other")]
        pool = EnginePool(engines)
        await bring_up(pool)
        assert not pool.is_coming
        watching = asyncio.create_task(pool.lost())
        engines[0].die()
        await watching
        assert not pool.is_coming, "the other one answers"
        engines[1].die()
        waiting = ask(pool)
        await settle()
        assert pool.is_coming
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pool.close()

    asyncio.run(work())
