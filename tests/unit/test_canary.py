"""The canary: the trainer scores the engine's answer, and scores the likely one in advance to save the wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tandem.bridge.null import NullBridge
from tandem.build import built_model, run_engines
from tandem.engine.null import NullEngine
from tandem.engine.pool import EnginePool
from tandem.errors import EngineLost, LogprobGap, SyncTimeout
from tandem.publish import Call, Canary, Publisher, on_this_thread
from tandem.spec.model import PresetModel
from tandem.spec.precision import Float32Precision
from tandem.types import Completion, Message, Proof, Sampling, Served, Span, Weights

CANARY = Canary((1, 2), floor=1e-4, ceiling=1e-2)


class Engine(NullEngine):
    """Says `says`, and is as sure of every token as the trainer is, or `off` by so much."""

    def __init__(self) -> None:
        self.says, self.off, self.chance, self.gone = [7], 0.0, 0.0, False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **_: Any) -> Completion:
        assert sampling.urgent or sampling.temperature  # a canary that waited for the answers of others
        await asyncio.sleep(0.01)
        if self.gone:
            raise EngineLost("it was stopped")
        says = self.says[: sampling.max_tokens]
        logprobs = [logprob + self.off for logprob in sure_of(says)]
        logprobs[0] += self.chance
        return Completion(says, logprobs, [Span(self.version, len(says))], "length")


class Teacher:
    version = 1

    def __init__(self) -> None:
        self.scored: list[list[int]] = []

    def export(self, kind: Any) -> Weights:
        return Weights(self.version, "live", lambda: iter(()))

    def score(self, ids: Sequence[int], first: int) -> list[float]:
        self.scored.append(list(ids[first:]))
        return sure_of(ids[first:])

    def base(self) -> Iterator[Any]:
        return iter(())

    def live_in(self, storage: Any) -> None: ...


def sure_of(ids: Sequence[int]) -> list[float]:
    return [-float(each) for each in ids]


async def versions(said: Sequence[list[int]], call: Call) -> list[list[list[int]]]:
    """What was scored for each version."""
    engine, teacher = Engine(), Teacher()
    publisher = Publisher(NullBridge(), engine, canary=CANARY, call=call)
    found: list[list[list[int]]] = []
    for version, engine.says in enumerate(said, 1):
        teacher.version, teacher.scored = version, []
        proof = await publisher.publish(teacher)
        assert (proof.logprob_gap, proof.canary_tokens) == (0.0, len(engine.says))
        found.append(teacher.scored)
    return found


def test_the_last_answer_is_scored_meanwhile_and_another_one_anew() -> None:
    found = asyncio.run(versions([[7], [7], [8], [8, 9]], asyncio.to_thread))
    assert found == [[[7]], [[7]], [[7], [8]], [[8], [8, 9]]]


def test_where_the_engine_computes_on_the_same_thread_nothing_is_guessed() -> None:
    assert asyncio.run(versions([[7], [7], [8]], on_this_thread)) == [[[7]], [[7]], [[8]]]


@pytest.mark.parametrize("guessed", [False, True])
def test_a_gap_is_found_whether_the_answer_was_guessed_or_not(guessed: bool) -> None:
    async def work() -> None:
        engine, teacher = Engine(), Teacher()
        publisher = Publisher(NullBridge(), engine, canary=CANARY)
        await publisher.publish(teacher)
        teacher.version, engine.off, engine.says = 2, 0.02, [7] if guessed else [8]
        await publisher.publish(teacher)

    with pytest.raises(LogprobGap, match=r"differ by 0\.0200"):
        asyncio.run(work())


class Unread(Engine):
    """Whose memory nobody can read back."""

    async def load(self, version: int) -> Served:
        return replace(await super().load(version), read_back=False)


async def doubted(engine: Engine, tokens: int) -> Proof:
    """Of the second version, after a first one without any gap."""
    teacher = Teacher()
    publisher = Publisher(NullBridge(), engine, canary=replace(CANARY, floor=0.05, doubted_tokens=tokens))
    off, engine.off, chance, engine.chance = engine.off, 0.0, engine.chance, 0.0
    await publisher.publish(teacher)
    teacher.version, engine.off, engine.chance = 2, off, chance
    return await publisher.publish(teacher)


def test_a_gap_of_few_tokens_may_be_chance_and_many_decide() -> None:
    engine = Engine()
    engine.says, engine.chance = [7] * 100, 0.12
    with pytest.raises(LogprobGap, match=r"differ by 0\.0600"):
        asyncio.run(doubted(engine, 2))
    proof = asyncio.run(doubted(engine, 24))
    assert (proof.logprob_gap, proof.canary_tokens) == (pytest.approx(0.12 / 24), 24)
    engine.off = 0.051
    with pytest.raises(LogprobGap, match=r"differ by 0\.0560"):
        asyncio.run(doubted(engine, 24))
    unread = Unread()
    unread.says, unread.chance = engine.says, engine.chance
    with pytest.raises(LogprobGap, match=r"differ by 0\.0600"):  # the canary is all that proves it
        asyncio.run(doubted(unread, 24))
    engine.off, engine.chance = 0.0, 0.42  # nobody is so far off by chance
    with pytest.raises(LogprobGap, match=r"differ by 0\.2100"):
        asyncio.run(doubted(engine, 24))
    engine.off = math.nan
    with pytest.raises(LogprobGap):
        asyncio.run(doubted(engine, 24))


def test_an_engine_that_is_lost_while_the_guess_is_scored_is_lost_and_nothing_is_left_over() -> None:
    async def work() -> None:
        engine, teacher = Engine(), Teacher()
        publisher = Publisher(NullBridge(), engine, canary=CANARY)
        await publisher.publish(teacher)
        engine.gone, teacher.version = True, 2
        with pytest.raises(EngineLost):
            await publisher.publish(teacher)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(work())


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_every_engine_of_a_pool_is_asked(odd: int) -> None:
    """Each takes the weights; one of them computes another model."""

    async def work() -> None:
        engines = [Engine() for _ in range(3)]
        publisher = Publisher(NullBridge(), EnginePool(engines), canary=CANARY)
        assert (await publisher.publish(Teacher())).canary_tokens == 3
        engines[odd].off = 0.02
        await publisher.publish(Teacher())

    with pytest.raises(LogprobGap, match=rf"trainer and engine {odd + 1} of 3 differ by 0\.0200"):
        asyncio.run(work())


def test_one_of_a_pool_that_is_lost_over_it_is_left_out() -> None:
    async def work() -> None:
        engines = [Engine(), Engine()]
        pool = EnginePool(engines)
        publisher = Publisher(NullBridge(), pool, canary=CANARY)
        engines[0].gone = True
        assert (await publisher.publish(Teacher())).canary_tokens == 1
        assert (await pool.generate([1], Sampling())).ids == [7]
        engines[1].gone = True
        with pytest.raises(EngineLost, match="no engine is left"):
            await publisher.publish(Teacher())
        await pool.close()

    asyncio.run(work())


@pytest.fixture(scope="module")
def tiny() -> built_model.BuiltModel:
    return built_model.model(PresetModel(preset="tiny"), Float32Precision(), 0, built_model.pick_device("cpu"))


@pytest.mark.parametrize("context", [2048, 64, 20, 9])
def test_a_canary_fits_into_the_engines_context(context: int, tiny: built_model.BuiltModel) -> None:
    canary = run_engines.canary(replace(tiny, context=context))
    prompts = [canary.prompt_ids, *canary.more_prompts]
    assert min(33, context - 8) <= len(canary.prompt_ids)
    assert all(0 < len(prompt) <= context - canary.doubted_tokens for prompt in prompts)


def test_a_canary_asks_the_runs_own_prompts_in_the_models_template(tiny: built_model.BuiltModel) -> None:
    own: list[list[Message]] = [
        [{"role": "user", "content": f"sort these letters into their order, please: waltz {number}"}]
        for number in range(2)
    ]
    short: list[Message] = [{"role": "user", "content": "hi"}]
    canary = run_engines.canary(tiny, prompts=[short, *own])
    prompts = [canary.prompt_ids, *canary.more_prompts]
    assert list(canary.prompt_ids) == tiny.renderer.prompt(own[0])  # the first that fills two blocks of a prefix cache
    assert tuple(tiny.renderer.prompt(own[1])) in prompts
    assert tuple(tiny.renderer.prompt(short)) in prompts
    assert len(set(prompts)) == 8


def test_the_limit_comes_from_all_prompts_of_a_fresh_engine_and_later_versions_ask_one() -> None:
    async def work() -> list[Proof]:
        engine, teacher = Engine(), Teacher()
        engine.says, engine.chance = [7] * 8, 0.08  # the first token of each answer is far off
        canary = replace(CANARY, floor=1e-3, ceiling=0.03, doubted_tokens=8, more_prompts=((3, 4), (5, 6)))
        publisher = Publisher(NullBridge(), engine, canary=canary)
        proofs = [await publisher.publish(teacher)]
        engine.chance, engine.off, teacher.version = 0.0, 0.03, 2
        proofs.append(await publisher.publish(teacher))
        engine.off, teacher.version = 0.05, 3
        with pytest.raises(LogprobGap, match=r"differ by 0\.0500 .* \(24 tokens\), and the limit is 0\.0400"):
            await publisher.publish(teacher)
        return proofs

    fresh, later = asyncio.run(work())
    assert (fresh.logprob_gap, fresh.gap_limit, fresh.canary_tokens) == (pytest.approx(0.01), pytest.approx(0.04), 24)
    assert (later.logprob_gap, later.canary_tokens) == (pytest.approx(0.03), 2)


class Slow(Engine):
    takes_s = 0.05

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **_: Any) -> Completion:
        await asyncio.sleep(self.takes_s)
        return await super().generate(prompt_ids, sampling)


def test_each_prompt_of_a_fresh_engine_has_the_deadline_for_itself() -> None:
    """On a busy CPU the prompts of a real model took 70 s together; the run ended, as if its engine were lost."""

    async def work() -> Proof:
        engine, teacher = Slow(), Teacher()
        canary = replace(CANARY, more_prompts=tuple((3, each) for each in range(9)))
        publisher = Publisher(NullBridge(), engine, canary=canary, deadline_s=0.3)
        proof = await publisher.publish(teacher)
        engine.takes_s, teacher.version = 5.0, 2
        with pytest.raises(SyncTimeout, match=r"version 2: the canary's prompt was not .* sync\.deadline_s = 0\.3 s"):
            await publisher.publish(teacher)
        return proof

    assert asyncio.run(work()).canary_tokens == 10
