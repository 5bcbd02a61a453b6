"""Several engines as one: who is asked, who is left out, who is taken back; and that no two versions serve as one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from trainers import llama

from tandem.bridge.inproc import InprocBridge
from tandem.engine import pool as pool_module
from tandem.engine.hf import EmbeddedEngine
from tandem.engine.pool import EnginePool
from tandem.errors import EngineError, EngineLost, EngineSilent, SyncError, TandemError
from tandem.ops.tensors import live_tensors
from tandem.protocols import OnToken
from tandem.publish import Publisher
from tandem.types import Completion, Proof, Sampling, Served, Span, Weights

pytestmark = pytest.mark.usefixtures("one_thread")


class Script:
    """Engine of a script. It dies, returns with nothing loaded, refuses versions, or holds its answers back."""

    receivers = 1

    def __init__(self, name: str, version: int = 1) -> None:
        self.name, self.version = name, version
        self.dead, self.alive = asyncio.Event(), asyncio.Event()
        self.alive.set()
        self.answering = asyncio.Event()
        self.answering.set()
        self.asked = self.attaches = self.loads = 0
        self.refuses: TandemError | None = None
        self.loading = asyncio.Event()
        self.loading.set()
        self.ranks: list[Any] = []
        self.gone = asyncio.Event()
        """It is not who was attached."""

    def die(self) -> None:
        self.alive.clear()
        self.dead.set()
        self.gone.set()

    def come_back(self) -> None:
        self.version = -1
        self.dead.clear()
        self.alive.set()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: Any = None, on_token: OnToken | None = None
    ) -> Completion:
        self.asked += 1
        version = self.version
        if self.gone.is_set():
            raise EngineLost(f"{self.name} was started anew")
        if on_token is not None:
            on_token(7, 0.0, version)
        await self._unless_dead(self.answering.wait())
        assert version >= 0, f"{self.name} was asked before it had a version"
        return Completion([7], [0.0], [Span(version, 1)], "stop")

    async def attach(self, source: Any) -> None:
        await self._unless_dead(asyncio.sleep(0))
        self.attaches += 1
        self.ranks.append(source.link.get("rank"))
        self.gone.clear()
        source.attached({"name": self.name})

    async def load(self, version: int) -> Served:
        self.loads += 1
        await self._unless_dead(self.loading.wait())
        if self.gone.is_set():
            raise EngineLost(f"{self.name} was started anew")
        if self.refuses is not None:
            raise self.refuses
        self.version = version
        return Served(version, {"a": f"{version}"}, (self.name,), self.loads)

    async def sleep(self) -> None:
        await self._unless_dead(asyncio.sleep(0))

    wake = sleep

    async def lost(self) -> None:
        await self.gone.wait()

    async def close(self) -> None: ...

    async def _unless_dead(self, wait: Awaitable[Any]) -> None:
        waits = [asyncio.ensure_future(wait), asyncio.ensure_future(self.dead.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if self.dead.is_set():
            raise EngineLost(f"{self.name} is gone")


class Tells(Script):
    """It says itself when it is there again."""

    async def found(self) -> None:
        await self.alive.wait()


class Source:
    def __init__(self) -> None:
        self.carries, self.link = "full", {"mode": "file"}
        self.replies: list[Any] = []

    def attached(self, reply: Any) -> None:
        self.replies.append(reply["name"])


def play(scenario: Callable[[], Awaitable[Any]]) -> Any:
    """To its end, and nothing is left behind."""

    async def go() -> Any:
        result = await asyncio.wait_for(scenario(), 20)
        await asyncio.sleep(0.01)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert left == set()
        return result

    return asyncio.run(go())


def ask(pool: EnginePool, **options: Any) -> asyncio.Task[Completion]:
    return asyncio.create_task(pool.generate([1], Sampling(), **options))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def bring_up(pool: EnginePool, version: int = 1) -> Served:
    await pool.attach(Source())  # pyright: ignore
    return await pool.load(version)


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
    monkeypatch.setattr(pool_module, "_SESSIONS_KEPT", 10)

    async def scenario() -> None:
        pool = EnginePool([Script("one"), Script("other")])
        for number in range(50):
            await pool.generate([1], Sampling(), session=f"{number}")
            await pool.generate([1], Sampling(), session="kept")
        assert len(pool._home) == 10
        assert "kept" in pool._home
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
        assert (other.asked, len(pool._those("in"))) == (0, 2)
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
        assert (await asyncio.wait_for(waiting, 1)).ids == [7]
        await asyncio.wait_for(watching, 1)
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
        with pytest.raises(EngineLost, match=r"8 engines, and all were lost.*fell over"):
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
        await asyncio.wait_for(pool.lost(), 1)
        assert pool.receivers == 1
        served = await bring_up(pool, 2)
        assert served.engines == ("other",)
        watching = asyncio.create_task(pool.lost())
        await asyncio.sleep(0.02)
        assert not watching.done()
        one.come_back()
        await asyncio.wait_for(watching, 1)
        assert pool.receivers == 2
        assert (await bring_up(pool, 2)).engines == ("one", "other")
        assert (one.ranks, other.ranks) == ([0, 0], [1, 0, 1])
        slow, source = one._unless_dead, Source()

        async def later(wait: Any) -> None:
            await asyncio.sleep(0.01)
            await slow(wait)

        one._unless_dead = later
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
        await asyncio.wait_for(pool.lost(), 1)
        await bring_up(pool, 2)
        await pool.close()

    play(scenario)


def test_an_engine_that_cannot_say_that_it_is_back_is_tried_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_TRY_AGAIN_S", 0.05)

    async def scenario() -> float:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        await bring_up(pool)
        one.die()
        await pool.lost()
        await bring_up(pool)
        one.come_back()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.wait_for(pool.lost(), 1)
        took_s = loop.time() - began
        assert (await bring_up(pool)).engines == ("one", "other")
        await pool.close()
        return took_s

    assert 0.03 < play(scenario) < 0.5


def test_an_engine_that_fails_over_and_over_is_tried_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_TRY_AGAIN_S", 0.02)

    async def scenario() -> None:
        one, other = Tells("one"), Tells("other")
        one.refuses = SyncError("its rank is too small")
        pool = EnginePool([one, other])
        await bring_up(pool)

        async def keep() -> None:
            while True:
                await pool.lost()
                await bring_up(pool)

        keeping = asyncio.create_task(keep())
        await asyncio.sleep(0.6)
        keeping.cancel()
        assert 3 <= one.loads <= 8, "0.02, 0.04, 0.08, 0.16, ... s apart"
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
        assert (await asyncio.wait_for(waiting, 1)).versions == [5]
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
        assert [member.state for member in pool._members] == ["in"]
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
        await asyncio.wait_for(watching, 1)
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


# --- one version, or none


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
        await asyncio.wait_for(pool.lost(), 1)
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
        assert [member.state for member in pool._members] == ["out", "in"]
        assert pool.version == 2
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
        assert [member.state for member in pool._members] == ["in", "in"]
        await pool.close()

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
        assert pool._those("in") == []
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


def test_sleep_leaves_out_who_is_gone_and_fails_when_nobody_is_left() -> None:
    async def scenario() -> None:
        one, other = Script("one"), Script("other")
        pool = EnginePool([one, other])
        await bring_up(pool, 1)
        one.die()
        await pool.sleep()
        await pool.wake()
        assert len(pool._those("in")) == 1
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


# --- with Publisher.keep


class Teacher:
    version = 1

    def __init__(self, module: Any = None) -> None:
        self.module = module

    def export(self, kind: Any) -> Weights:
        return Weights(self.version, kind, lambda: live_tensors(self.module) if self.module else iter(()))

    def score(self, ids: Sequence[int], first: int) -> list[float]:
        raise NotImplementedError

    def base(self) -> Any:
        return iter(())

    def live_in(self, storage: Any) -> None: ...


class Agrees(InprocBridge):
    """Sends nothing, and says what the scripts say that they serve."""

    def source(self, num_receivers: int = 1) -> Any:
        self.receivers = num_receivers
        return Source()

    def send(self, weights: Weights) -> Any:
        sent = super().send(weights)
        return type(sent)(sent.version, "file", {"a": f"{weights.version}"})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def test_keep_goes_on_without_an_engine_that_died_and_takes_it_back_when_it_answers() -> None:
    async def scenario() -> list[tuple[str, ...]]:
        engines = [Tells("a"), Tells("b"), Tells("c")]
        pool, proofs = EnginePool(engines), list[Proof]()
        publisher = Publisher(Agrees(), pool, deadline_s=1.0, retries=2, on_proof=proofs.append)
        teacher = Teacher()
        await publisher.publish(teacher)
        keeping = asyncio.create_task(publisher.keep(teacher))
        for gone in engines[:2]:
            gone.die()
            await until(lambda: len(proofs[-1].engines) < len(pool._members) - len(pool._those("out")) + 1)
            await until(lambda name=gone.name: name not in proofs[-1].engines)
        assert (await pool.generate([1], Sampling())).versions == [1]
        teacher.version = 2
        await publisher.publish(teacher)
        for back in engines[:2]:
            back.come_back()
            await until(lambda name=back.name: name in proofs[-1].engines)
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await pool.close()
        return [proof.engines for proof in proofs]

    assert play(scenario)[-1] == ("a", "b", "c")


@pytest.mark.parametrize("seed", range(6))
def test_whatever_dies_and_returns_every_request_is_answered_by_a_version_that_was_proven(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_TRY_AGAIN_S", 0.005)
    monkeypatch.setattr(pool_module, "_MOST_ASKED", 60)
    rng = random.Random(seed)

    async def scenario() -> None:
        engines = [Tells(name) for name in "abc"]
        for engine in engines:
            engine.version = -1
        pool, proofs = EnginePool(engines), list[Proof]()
        publisher = Publisher(Agrees(), pool, deadline_s=1.0, retries=8, on_proof=proofs.append)
        teacher, stopped, answered = Teacher(), asyncio.Event(), list[Completion]()
        await publisher.publish(teacher)

        async def client() -> None:
            while not stopped.is_set():
                answered.append(await pool.generate([1], Sampling(), session=rng.choice([None, "x", "y"])))
                await asyncio.sleep(0.0005)

        work = [asyncio.create_task(client()) for _ in range(8)]
        keeping = asyncio.create_task(publisher.keep(teacher))
        for _ in range(60):
            what, engine = rng.choice(["die", "back", "back", "publish"]), rng.choice(engines)
            alive = [each for each in engines if each.alive.is_set()]
            if what == "die" and engine.alive.is_set() and len(alive) > 1:
                engine.die()
            if what == "back" and not engine.alive.is_set():
                engine.come_back()
            if what == "publish":
                async with publisher.lock:
                    teacher.version += 1
                await publisher.publish(teacher)
            await asyncio.sleep(rng.choice([0, 0.001, 0.003]))
            assert not keeping.done(), keeping
        for engine in engines:
            if not engine.alive.is_set():
                engine.come_back()
        await until(lambda: len(pool._those("in")) == 3 and {each.version for each in engines} == {teacher.version})
        stopped.set()
        await asyncio.wait_for(asyncio.gather(*work), 2)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await pool.close()
        proven = {proof.version for proof in proofs}
        assert {version for each in answered for version in each.versions} <= proven
        assert len(answered) > 50

    play(scenario)


class Mortal:
    """A real engine that can be killed, and returns with nothing loaded."""

    receivers = 1

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.inner = engine
        self.dead, self.alive, self.loaded = asyncio.Event(), asyncio.Event(), False
        self.alive.set()

    @property
    def version(self) -> int:
        return self.inner.version if self.loaded else -1

    def die(self) -> None:
        self.loaded = False
        self.alive.clear()
        self.dead.set()

    def come_back(self) -> None:
        self.dead.clear()
        self.alive.set()

    async def generate(self, *args: Any, **options: Any) -> Completion:
        assert self.loaded, "asked before it had a version"
        return await self._unless_dead(self.inner.generate(*args, **options))

    async def attach(self, source: Any) -> None:
        await self._unless_dead(self.inner.attach(source))

    async def load(self, version: int) -> Served:
        served = await self._unless_dead(self.inner.load(version))
        self.loaded = True
        return served

    async def sleep(self) -> None:
        await self._unless_dead(self.inner.sleep())

    async def wake(self) -> None:
        await self._unless_dead(self.inner.wake())

    async def lost(self) -> None:
        await self.dead.wait()

    async def found(self) -> None:
        await self.alive.wait()

    async def close(self) -> None:
        await self.inner.close()

    async def _unless_dead(self, work: Awaitable[Any]) -> Any:
        working, death = asyncio.ensure_future(work), asyncio.ensure_future(self.dead.wait())
        try:
            await asyncio.wait([working, death], return_when=asyncio.FIRST_COMPLETED)
            if self.dead.is_set():
                raise EngineLost("killed")
            return working.result()
        finally:
            working.cancel()
            death.cancel()
            await asyncio.gather(working, death, return_exceptions=True)


def test_real_engines_that_are_killed_in_turn_lose_no_request_and_change_no_token() -> None:
    module = llama()
    num_ids = module.config.vocab_size
    requests = [([1 + i % 7, 2, 3], Sampling(max_tokens=24, seed=i, temperature=1.0)) for i in range(24)]

    def make() -> Mortal:
        options: dict[str, Any] = {"num_ids": num_ids, "end_ids": frozenset[int](), "decode": str}
        return Mortal(EmbeddedEngine(module, inline=False, max_running=4, **options))

    async def completions(disturb: bool) -> list[Completion]:
        engines = [make(), make()]
        pool, proofs = EnginePool(engines), list[Proof]()
        publisher = Publisher(InprocBridge(1.0), pool, deadline_s=5.0, retries=3, on_proof=proofs.append)
        teacher = Teacher(module)
        await publisher.publish(teacher)
        keeping = asyncio.create_task(publisher.keep(teacher))
        work = [asyncio.create_task(pool.generate(*request)) for request in requests]
        kills = 0
        while disturb and kills < 7 and not all(task.done() for task in work):
            victim = engines[kills % 2]
            await asyncio.sleep(0.03)
            victim.die()
            kills += 1
            await until(lambda victim=victim: not any(m.engine is victim for m in pool._those("in")))
            victim.come_back()
            await until(lambda: len(pool._those("in")) == 2)
        answers = await asyncio.gather(*work)
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await pool.close()
        assert not disturb or kills >= 2
        return answers

    calm, disturbed = play(lambda: completions(False)), play(lambda: completions(True))
    assert [each.ids for each in disturbed] == [each.ids for each in calm]
    assert {version for each in disturbed for version in each.versions} == {1}
