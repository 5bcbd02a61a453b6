"""A pool under Publisher.watch: engines die and return, and every answer is of a proven version."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from pool_script import Source, Tells, play
from trainers import llama

from tandem.bridge.inproc import InprocBridge
from tandem.engine import pool as pool_module
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.engine.pool import EnginePool
from tandem.errors import EngineLost
from tandem.ops.named_tensors import live_tensors
from tandem.publish import Publisher
from tandem.types import Completion, Proof, Sampling, Served, Weights

pytestmark = pytest.mark.usefixtures("one_thread")


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
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_keep_goes_on_without_an_engine_that_died_and_takes_it_back_when_it_answers() -> None:
    async def scenario() -> list[tuple[str, ...]]:
        engines = [Tells("a"), Tells("b"), Tells("c")]
        pool, proofs = EnginePool(engines), list[Proof]()
        publisher = Publisher(Agrees(), pool, deadline_s=1.0, retries=2, on_proof=proofs.append)
        teacher = Teacher()
        await publisher.publish(teacher)
        keeping = asyncio.create_task(publisher.watch(teacher))
        for gone in engines[:2]:
            gone.die()
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
    monkeypatch.setattr(pool_module, "TRY_AGAIN_S", 0.005)
    monkeypatch.setattr(pool_module, "MOST_ASKED", 60)
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
        keeping = asyncio.create_task(publisher.watch(teacher))
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
        await until(lambda: len(proofs[-1].engines) == 3 and {each.version for each in engines} == {teacher.version})
        stopped.set()
        await asyncio.wait_for(asyncio.gather(*work), 10)
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
        return await self.unless_dead(self.inner.generate(*args, **options))

    async def attach(self, source: Any) -> None:
        await self.unless_dead(self.inner.attach(source))

    async def load(self, version: int) -> Served:
        served = await self.unless_dead(self.inner.load(version))
        self.loaded = True
        return served

    async def sleep(self) -> None:
        await self.unless_dead(self.inner.sleep())

    async def wake(self) -> None:
        await self.unless_dead(self.inner.wake())

    async def lost(self) -> None:
        await self.dead.wait()

    async def found(self) -> None:
        await self.alive.wait()

    async def close(self) -> None:
        await self.inner.close()

    async def unless_dead(self, work: Awaitable[Any]) -> Any:
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
        keeping = asyncio.create_task(publisher.watch(teacher))
        work = [asyncio.create_task(pool.generate(*request)) for request in requests]
        kills = 0
        while disturb and kills < 7 and not all(task.done() for task in work):
            victim = engines[kills % 2]
            await asyncio.sleep(0.03)
            victim.die()
            kills += 1
            await until(lambda: pool.receivers == 1)
            before = len(proofs)
            victim.come_back()
            await until(lambda before=before: len(proofs) > before and len(proofs[-1].engines) == 2)
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
