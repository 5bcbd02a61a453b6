"""Requests when new weights come: each follows them, ends under its own version, or begins again, as it asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import voting_model as votes
from tandem.bridge.collective.sender import BroadcastBridge
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.publish import Publisher
from tandem.types import Completion, Sampling
from tandem.vllm_worker.weight_sources import open_source

TOKENS = 240


def play(work: Callable[[EmbeddedEngine, Callable[[int], Awaitable[None]]], Awaitable[Any]], **more: Any) -> Any:
    """`work` gets an engine of voting weights, and what publishes the next version."""

    async def run() -> Any:
        engine = EmbeddedEngine(
            votes.make(), num_ids=256, end_ids=frozenset(), decode=lambda ids: "", inline=False, max_running=8, **more
        )
        bridge, teacher = BroadcastBridge(backend="ipc"), votes.Teacher(votes.make())

        class Across:
            """The bridge's own two ends, as in two processes."""

            receivers = 1
            version = property(lambda _: engine.version)
            generate, load = engine.generate, engine.load

            async def attach(self, source: Any) -> None:
                end = await asyncio.to_thread(open_source, dict(source.link))
                await engine.attach(end)
                source.attached(dict(end.reply))

        publisher = Publisher(bridge, Across())  # pyright: ignore[reportArgumentType]

        async def publish(version: int) -> None:
            teacher.vote(version)
            await publisher.publish(teacher)

        try:
            await publish(0)
            return await work(engine, publish)
        finally:
            await engine.close()
            bridge.close()

    return asyncio.run(run())


async def let_go(engine: EmbeddedEngine) -> None:
    """The old weights are, once nobody is pinned to them."""
    async with asyncio.timeout(10):
        while engine._twins:
            await asyncio.sleep(0.005)


def sound(completion: Completion) -> bool:
    """Every token was made, whole, by the version that it is stamped with."""
    return all(votes.speaks_for(*pair) for pair in zip(completion.ids, completion.versions, strict=True))


def test_each_request_has_its_wish_while_others_have_theirs():
    async def work(engine: EmbeddedEngine, publish: Callable[[int], Awaitable[None]]) -> list[Completion]:
        made: list[int] = []
        wishes = ("follow", "pin", "restart", "pin", "")
        tasks = [
            asyncio.create_task(
                engine.generate(
                    [n + 1] * 5,
                    Sampling(max_tokens=TOKENS, temperature=0.0, on_update=wish),
                    on_token=lambda token, logprob, version: made.append(version),
                )
            )
            for n, wish in enumerate(wishes)
        ]
        for version in (1, 2):
            while made.count(version - 1) < 25:
                await asyncio.sleep(0.001)
            await publish(version)
        assert len(engine._twins) <= 1
        done = await asyncio.gather(*tasks)
        await let_go(engine)
        return done

    follow, pin, restart, other_pin, plain = play(work)
    assert [len(each.ids) for each in (follow, pin, restart, other_pin, plain)] == [TOKENS] * 5
    assert [span.version for span in follow.spans] == [span.version for span in plain.spans] == [0, 1, 2]
    assert [span.version for span in pin.spans] == [span.version for span in other_pin.spans] == [0]
    assert [span.version for span in restart.spans] == [2]
    assert all(sound(each) for each in (follow, pin, restart, other_pin, plain))


def test_a_cancelled_pin_keeps_no_weights():
    async def work(engine: EmbeddedEngine, publish: Callable[[int], Awaitable[None]]) -> None:
        sampling = Sampling(max_tokens=400, temperature=0.0, on_update="pin")
        made: list[int] = []
        task = asyncio.create_task(engine.generate([1, 2], sampling, on_token=lambda *token: made.append(token[2])))
        while len(made) < 5:
            await asyncio.sleep(0.001)
        await publish(1)
        assert len(engine._twins) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await let_go(engine)
        assert sound(await engine.generate([3], Sampling(max_tokens=5, temperature=0.0)))

    play(work)


def test_an_older_version_is_asked_beside_the_one_that_serves():
    async def work(engine: EmbeddedEngine, publish: Callable[[int], Awaitable[None]]) -> None:
        await publish(5)
        old = engine.beside({name: tensor.detach() for name, tensor in votes.make(3).named_parameters()}, 3)
        try:
            greedy = Sampling(max_tokens=50, temperature=0.0)
            both = await asyncio.gather(old.generate([1, 2], greedy), engine.generate([1, 2], greedy))
        finally:
            await old.close()
        assert [each.spans[0].version for each in both] == [3, 5]
        assert all(sound(each) for each in both)

    play(work)


def test_nobody_is_let_in_while_a_version_waits_for_what_runs_however_urgent():
    """They would be answered by the version that is over."""

    async def work(engine: EmbeddedEngine, publish: Callable[[int], Awaitable[None]]) -> list[Completion]:
        told: list[int] = []
        other = asyncio.create_task(
            engine.generate([1] * 5, Sampling(max_tokens=TOKENS, temperature=0.0), on_token=lambda *_: told.append(1))
        )
        while not told:
            await asyncio.sleep(0.001)
        publishing = asyncio.create_task(publish(1))
        while not engine._draining:
            assert not other.done()
            await asyncio.sleep(0.001)
        urgent = await engine.generate([2] * 5, Sampling(max_tokens=3, temperature=0.0, urgent=True))
        await publishing
        return [await other, urgent]

    done = play(work, on_update="finish")
    assert [set(each.versions) for each in done] == [{0}, {1}]
    assert all(map(sound, done))
