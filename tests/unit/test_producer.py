"""The producer replaces groups without signal, up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tandem.algo.policy_gradient import has_signal
from tandem.rollout.episode import Setting
from tandem.rollout.producer import EnvironmentProducer
from tandem.rollout.store import MemoryStore
from tandem.types import Completion, Message, Outcome, Sampling, Span, Task


class AllAlike:
    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(str(number), ({"role": "user", "content": "?"},)) for number in range(5)]

    async def run(self, task: Task, chat) -> Outcome:
        await chat.reply()
        return Outcome(0.0)


class Says:
    version = 0

    def __init__(self) -> None:
        self.seeds: list[int | None] = []

    async def generate(self, prompt_ids, sampling, *, session=None, on_token=None) -> Completion:
        self.seeds.append(sampling.seed)
        return Completion([7], [-0.5], [Span(0, 1)], "stop")


class Plain:
    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return [1, 2]

    def glue(self, messages: Sequence[Message], last_id: int) -> list[int]:
        return [3]

    def visible(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        return "."

    def thought(self, ids, stop=()) -> None:
        return None


def dropped_before_four_are_taken(max_replaced: int, says: Says | None = None) -> float:
    async def play() -> float:
        store = MemoryStore(4, take_timeout_s=5)
        setting = Setting(AllAlike(), says or Says(), Plain(), Sampling(), 64, 5.0, 5.0)
        producer = EnvironmentProducer(
            setting, store, has_signal, group_size=2, seed=0, max_failed_share=0.0, max_replaced=max_replaced
        )
        running = asyncio.create_task(producer.run())
        try:
            assert len(await store.take(4)) == 4
            return producer.drain_metrics()["groups/dropped"]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return asyncio.run(play())


def test_equal_groups_count_where_nobody_asked_to_replace_them():
    assert dropped_before_four_are_taken(0) == 0


def test_after_so_many_replaced_in_a_row_equal_groups_count_until_one_teaches():
    assert dropped_before_four_are_taken(9) == 9


def test_every_sibling_of_every_group_has_a_seed_of_its_own():
    says = Says()
    dropped_before_four_are_taken(0, says)
    assert len(says.seeds) >= 8
    assert len(set(says.seeds)) == len(says.seeds)
