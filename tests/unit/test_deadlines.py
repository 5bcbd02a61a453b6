"""Deadlines of episodes: an engine without tokens for any request is silent; waiting for it costs no episode time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from stopwatch import Stopwatch
from tandem.errors import EngineSilent, EpisodeFailed
from tandem.rollout.episode import Setting, play
from tandem.types import Completion, Message, Outcome, Sampling, Span, Task, Trajectory

TASK = Task("t", ({"role": "user", "content": "?"},))
ANSWER = Completion([7], [-0.5], [Span(0, 1)], "stop")


class Plain:
    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return [1, 2]

    def glue(self, messages: Sequence[Message], last_id: int) -> list[int]:
        return [3]

    def visible(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        return "."

    def thought(self, ids, stop=()) -> None:
        return None


class OneByOne:
    """Serves requests in turn, each taking `seconds`, with a token every 20 ms (or none till the end)."""

    version = 0

    def __init__(self, seconds: float, *, tells: bool = True) -> None:
        self.seconds, self.tells, self.turn = seconds, tells, asyncio.Lock()

    async def generate(self, prompt_ids, sampling, *, session=None, on_token=None) -> Completion:
        async with self.turn:
            until = time.monotonic() + self.seconds
            while time.monotonic() < until:
                await asyncio.sleep(0.02)
                if self.tells:
                    on_token(7, -0.5, 0)
        return ANSWER


class Replies:
    def __init__(self, own_s: float = 0.0) -> None:
        self.own_s = own_s

    async def run(self, task: Task, chat) -> Outcome:
        await chat.reply()
        await asyncio.sleep(self.own_s)
        return Outcome(1.0)


def episodes(count: int, engine_s: float, *, own_s: float = 0.0, tells: bool = True) -> list[Trajectory]:
    """Under an engine deadline and an episode timeout of 0.2 s each."""

    async def all_of_them() -> list[Trajectory]:
        setting = Setting(Replies(own_s), OneByOne(engine_s, tells=tells), Plain(), Sampling(), 64, 0.2, 0.2)
        return await asyncio.gather(*(play(setting, TASK, [1, 2], seed) for seed in range(count)))

    return asyncio.run(all_of_them())


def test_a_request_that_waits_its_turn_is_no_silent_engine_and_no_hanging_episode():
    assert len(episodes(6, 0.15)) == 6  # the last one waits 0.75 s


def test_an_engine_that_makes_no_token_for_any_request_is_silent():
    with (
        Stopwatch() as watch,
        pytest.raises(EngineSilent, match=r"no token for any request within engine.deadline_s = 0\.2 s"),
    ):
        episodes(2, 5.0, tells=False)
    assert watch.seconds < 1.5


class ToldLate:
    """Tells of its tokens as late as it is allowed to."""

    version = 0

    def __init__(self) -> None:
        self.asked = list[Sampling]()

    async def generate(self, prompt_ids, sampling, *, session=None, on_token=None) -> Completion:
        self.asked.append(sampling)
        for _ in range(24):
            await asyncio.sleep(sampling.told_within_s)
            on_token(7, -0.5, 0)
        return ANSWER


def test_an_engine_may_tell_late_of_its_tokens_and_is_not_silent():
    engine = ToldLate()
    setting = Setting(Replies(), engine, Plain(), Sampling(), 64, 0.4, 0.2)
    assert asyncio.run(play(setting, TASK, [1, 2], 0)).reward == 1.0  # it took three times the deadline
    assert [each.told_within_s for each in engine.asked] == [0.05]


@pytest.mark.parametrize("comes", [True, False])
def test_an_engine_that_is_being_started_is_not_silent_and_one_that_was_may_be(comes: bool):
    class Starts(OneByOne):
        is_coming = True

    async def played() -> Trajectory:
        engine = Starts(0.9 if comes else 5.0, tells=False)
        episode = asyncio.ensure_future(
            play(Setting(Replies(), engine, Plain(), Sampling(), 64, 0.2, 0.2), TASK, [1], 0)
        )
        await asyncio.sleep(0.8)
        assert not episode.done()
        engine.is_coming = False
        return await episode

    if comes:
        assert asyncio.run(played()).num_trained == 1
    else:
        with pytest.raises(EngineSilent):
            asyncio.run(played())


def test_what_the_environment_does_itself_counts():
    with pytest.raises(EpisodeFailed, match="no outcome within"):
        episodes(1, 0.1, own_s=5.0)


def test_an_event_loop_that_was_held_by_a_training_step_is_no_silent_engine():
    async def both() -> Trajectory:
        setting = Setting(Replies(), OneByOne(0.3), Plain(), Sampling(), 64, 0.2, 0.2)
        episode = asyncio.ensure_future(play(setting, TASK, [1, 2], 0))
        await asyncio.sleep(0.05)
        time.sleep(0.5)  # longer than the deadline, but not the episode's time
        return await episode

    assert asyncio.run(both()).num_trained == 1
