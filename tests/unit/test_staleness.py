"""No token trained on is older than max_lag versions, whatever the engines' pace; and groups come in start order.

The real loop, store, producer and pool, over engines whose pace is random but seeded. They go on sampling while the
trainer works (`sleep` does nothing, as on a GPU of their own): the store alone keeps the bound.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tandem.bridge.inproc import InprocBridge
from tandem.engine.pool import EnginePool
from tandem.errors import SyncError
from tandem.loop import run_loop
from tandem.protocols import Chat
from tandem.publish import Publisher, on_this_thread
from tandem.rollout.episode import Setting
from tandem.rollout.producer import EnvironmentProducer
from tandem.rollout.store import MemoryStore
from tandem.types import (
    Batch,
    Completion,
    Group,
    Metrics,
    Outcome,
    Sampling,
    Served,
    Span,
    Task,
    Ticket,
    Totals,
    Weights,
)

GROUPS_PER_STEP, GROUP_SIZE, STEPS = 2, 2, 14


class Turns:
    """Time in turns of the event loop: no test waits for a clock."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    async def pass_by(self, least: int, most: int) -> None:
        for _ in range(self._rng.randint(least, most)):
            await asyncio.sleep(0)


class ScriptedEngine:
    """Samples the group's number, stamped with the version that each token was made under."""

    receivers = 1

    def __init__(self, seed: int) -> None:
        self.version = -1
        self._turns = Turns(seed)

    async def generate(self, prompt_ids, sampling: Sampling, *, session=None, on_token=None) -> Completion:
        order = sampling.seed // 1024 // 4096
        versions: list[int] = []
        for _ in range(3):
            await self._turns.pass_by(0, 60 if order % 5 == 0 else 12)  # every fifth group is slow
            versions.append(self.version)
        spans = [Span(version, len(list(same))) for version, same in itertools.groupby(versions)]
        return Completion([order] * 3, [0.0] * 3, spans, "stop")

    async def attach(self, source) -> None:
        self._source = source

    async def load(self, version: int) -> Served:
        weights = await asyncio.to_thread(self._source.receive, version)
        await self._turns.pass_by(5, 40)  # the old version serves until here
        self.version = weights.version
        return Served(version, {})

    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...

    async def lost(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None: ...


class Plain:
    """A renderer of nothing: what is under test is when tokens are made."""

    def prompt(self, messages) -> list[int]:
        return [0]

    def visible(self, ids, stop=()) -> str:
        return ""

    def thought(self, ids, stop=()) -> None:
        return None


class Always:
    def tasks(self, split: str) -> Sequence[Task]:
        return [Task("only", ({"role": "user", "content": "?"},))]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        await chat.reply()
        return Outcome(1.0)


@dataclass
class CountingTrainer:
    """Trains nothing; writes down how old the oldest token was, and which groups came."""

    version: int = 3
    lags: list[int] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)

    def batch(self, groups: list[Group], version: int) -> Batch:
        sampled = [v for group in groups for each in group for v in each.versions if v >= 0]
        self.lags.append(version - min(sampled))
        self.orders += [group[0].ids[-1] for group in groups]
        return Batch([], Totals(0, 0))

    def step(self, batch: Batch) -> Metrics:
        self.version += 1
        return {}

    def export(self, kind) -> Weights:
        return Weights(self.version, kind, lambda: iter(()))

    def score(self, ids, first) -> list[float]:
        return [0.0] * (len(ids) - first)

    def base(self):
        return iter(())

    def live_in(self, storage) -> None: ...
    def finish(self) -> None: ...
    def save(self, path) -> None: ...
    def load(self, path) -> None: ...


def train(
    max_lag: int,
    engines: int,
    sync_every: int = 1,
    *,
    seed: int = 0,
    store_class=MemoryStore,
    pool_class=EnginePool,
    refuse: bool = False,
) -> CountingTrainer:
    async def scenario() -> CountingTrainer:
        pool = pool_class([ScriptedEngine(seed * 10 + index) for index in range(engines)])
        bridge, trainer, pauses = InprocBridge(), CountingTrainer(), Turns(seed + 99)
        store = store_class((max_lag + 1) * GROUPS_PER_STEP, take_timeout_s=5.0)
        pool.store = store
        setting = Setting(Always(), pool, Plain(), Sampling(), 64, 5.0, 5.0)
        kept = random.Random(seed)
        producer = EnvironmentProducer(
            setting,
            store,
            lambda group: kept.random() < 0.8,
            group_size=GROUP_SIZE,
            seed=0,
            max_failed_share=0.0,
            max_replaced=10**6,
        )

        async def call(function, *args):
            await pauses.pass_by(0, 40)  # training and sending take their time, too
            return await on_this_thread(function, *args)

        async def after_step(metrics: Metrics) -> None: ...

        await run_loop(
            trainer=trainer, publisher=Publisher(bridge, pool, call=call),
            store=store, producers=[producer], make_batch=trainer.batch,
            groups_per_step=GROUPS_PER_STEP, last_version=trainer.version + STEPS, after_step=after_step,
            sync_every=sync_every, call=call, max_lag=max_lag if refuse else math.inf,
        )  # fmt: skip
        return trainer

    return asyncio.run(asyncio.wait_for(scenario(), 30))


SETTINGS = [
    (max_lag, engines, sync_every)
    for max_lag in (0, 1, 4)
    for engines in (1, 3)
    for sync_every in range(1, max_lag + 2)
]


@pytest.mark.parametrize(("max_lag", "engines", "sync_every"), SETTINGS)
def test_the_oldest_token_is_max_lag_versions_old_and_no_more(max_lag, engines, sync_every):
    for seed in range(3):
        trainer = train(max_lag, engines, sync_every, seed=seed, refuse=True)
        assert len(trainer.lags) == STEPS
        assert max(trainer.lags) == max_lag, f"seed {seed}: {trainer.lags}"


@pytest.mark.parametrize(("max_lag", "engines"), [(0, 1), (1, 3), (4, 1), (4, 3)])
def test_groups_are_trained_on_in_the_order_in_which_they_started(max_lag, engines):
    orders = train(max_lag, engines).orders
    assert len(orders) == STEPS * GROUPS_PER_STEP
    assert orders == sorted(set(orders))
    assert orders[-1] > len(orders)  # some were dropped in between


# --- planted: each of these breaks what the store promises


class FreesTheSlotWithTake(MemoryStore):
    async def take(self, count: int) -> list[Group]:
        groups = await super().take(count)
        await super().release(count)
        return groups

    async def release(self, count: int) -> None: ...


class ReleasedByTheEngine(MemoryStore):
    """With the pool below: a loop that releases before it publishes."""

    async def release(self, count: int) -> None: ...


class ReleasesBeforeLoad(EnginePool):
    store: MemoryStore

    async def load(self, version: int) -> Served:
        await MemoryStore.release(self.store, self.store.taken)
        return await super().load(version)


class HandsOutInFinishOrder(MemoryStore):
    async def put(self, ticket: Ticket, group: Group) -> None:
        await super().put(ticket, group)
        del self._in_flight[ticket.order]
        playing = [(order, each) for order, each in self._in_flight.items() if each is None]
        finished = [(order, each) for order, each in self._in_flight.items() if each is not None]
        self._in_flight = dict([*finished, (ticket.order, group), *playing])


class OneSlotTooMany(MemoryStore):
    def __init__(self, slots: int, **settings) -> None:
        super().__init__(slots + 1, **settings)


PLANTED = {
    "frees the slot with take": (FreesTheSlotWithTake, EnginePool),
    "releases before load": (ReleasedByTheEngine, ReleasesBeforeLoad),
    "hands out in finish order": (HandsOutInFinishOrder, EnginePool),
    "one slot too many": (OneSlotTooMany, EnginePool),
}


@pytest.mark.parametrize(("max_lag", "engines"), [(1, 1), (1, 3), (4, 3)])
@pytest.mark.parametrize(("store_class", "pool_class"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_store_or_loop_breaks_the_bound(store_class, pool_class, max_lag, engines):
    """In one of some seeds: at worst it takes a dozen."""
    runs = (train(max_lag, engines, seed=seed, store_class=store_class, pool_class=pool_class) for seed in range(200))
    assert any(max(run.lags) > max_lag for run in runs)


def test_the_loop_trains_on_no_older_token_than_it_may():
    """Whatever store, loop or engine did wrong: here a store frees slots too early."""
    with pytest.raises(SyncError, match=r"tokens of version \d+; train\.max_lag allows none before \d+"):
        train(1, 3, store_class=FreesTheSlotWithTake, refuse=True)


def test_a_store_that_hands_out_in_finish_order_breaks_the_order():
    orders = train(4, 3, store_class=HandsOutInFinishOrder).orders
    assert orders != sorted(orders)
