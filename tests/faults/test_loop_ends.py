"""Whatever dies or falls silent, the loop ends: with an error that has a name, within its deadline, leaving nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from stopwatch import Stopwatch
from tandem.bridge.inproc import InprocBridge
from tandem.errors import EngineError, EngineSilent, ProducerDied, Starved, StoreTimeout, SyncError, SyncTimeout
from tandem.loop import run_loop
from tandem.publish import Publisher
from tandem.rollout.episode import Setting
from tandem.rollout.producer import EnvironmentProducer
from tandem.rollout.store import MemoryStore
from tandem.types import Batch, Completion, Metrics, Outcome, Sampling, Sent, Served, Span, Task, Totals, Weights

SLACK_S = 0.5  # on top of a deadline


class Trainer:
    version = 0

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


class Engine:
    """Answers at once, and does every part of its work as it should."""

    version = -1
    receivers = 1

    async def generate(self, prompt_ids, sampling: Sampling, *, session=None, on_token=None) -> Completion:
        await asyncio.sleep(0)
        return Completion([7], [0.0], [Span(self.version, 1)], "stop")

    async def attach(self, source) -> None: ...

    async def load(self, version: int) -> Served:
        self.version = version
        return Served(version, {})

    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...

    async def lost(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None: ...


class Plain:
    def prompt(self, messages) -> list[int]:
        return [0]

    def glue(self, messages, last_id: int) -> list[int]:
        return [0]

    def visible(self, ids, stop=()) -> str:
        return ""

    def thought(self, ids, stop=()) -> None:
        return None


class Asks:
    def tasks(self, split: str):
        return [Task("only", ({"role": "user", "content": "?"},))]

    async def run(self, task: Task, chat: Any) -> Outcome:
        await chat.reply()
        return Outcome(1.0)


@dataclass
class Rig:
    """A run of the real loop that would go well for ever, if nothing in it were broken."""

    engine: Any
    bridge: Any
    environment: Any
    producer: Any = None
    keep: Callable[[Any], bool] = lambda group: True
    engine_deadline_s: float = 5.0
    sync_deadline_s: float = 5.0
    take_timeout_s: float = 5.0
    max_dropped: int = 20
    max_lag: int = 0
    sync_every: int = 1

    async def run(self, last_version: int = 1_000_000) -> None:
        store = MemoryStore(2 * (self.max_lag + 1), max_dropped=self.max_dropped, take_timeout_s=self.take_timeout_s)
        setting = Setting(self.environment, self.engine, Plain(), Sampling(), 64, self.engine_deadline_s, 10.0)
        producer = self.producer or EnvironmentProducer(
            setting, store, self.keep, group_size=2, seed=0, max_failed_share=0.0, max_replaced=10**6
        )

        async def after_step(metrics: Metrics) -> None: ...

        await run_loop(
            trainer=Trainer(), publisher=Publisher(self.bridge, self.engine, deadline_s=self.sync_deadline_s),
            store=store, producers=[producer],
            make_batch=lambda groups, version: Batch([], Totals(0, 0)), groups_per_step=2, last_version=last_version,
            after_step=after_step, sync_every=self.sync_every,
        )  # fmt: skip


def rig(**broken: Any) -> Rig:
    return replace(Rig(Engine(), InprocBridge(), Asks()), **broken)


def ended(rig: Rig) -> tuple[BaseException, Stopwatch]:
    """The error that ended the run, and how long it took. Checks that no task is left."""

    async def scenario() -> tuple[BaseException, Stopwatch]:
        with Stopwatch() as watch:
            [error] = await asyncio.gather(asyncio.wait_for(rig.run(), 20), return_exceptions=True)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert left == set(), f"left behind after {error!r}"
        assert isinstance(error, BaseException), "the run went well"
        return error, watch

    return asyncio.run(scenario())


def test_a_run_in_which_nothing_is_broken_goes_on_and_leaves_nothing():
    async def scenario() -> set[Any]:
        await rig().run(last_version=20)
        return asyncio.all_tasks() - {asyncio.current_task()}

    before = threading.active_count()
    assert asyncio.run(scenario()) == set()
    assert threading.active_count() == before


# --- producers


class Producer:
    def drain_metrics(self) -> Metrics:
        return {}


class Raises(Producer):
    async def run(self) -> None:
        await asyncio.sleep(0.05)
        raise ZeroDivisionError("a bug of ours")


class Returns(Producer):
    async def run(self) -> None:
        await asyncio.sleep(0.05)


class RaisesAGroup(Producer):
    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(Raises().run())


class Exits(Producer):
    async def run(self) -> None:
        raise asyncio.CancelledError  # of its own accord: nobody cancelled it


@pytest.mark.parametrize(
    ("producer", "text"),
    [
        (Raises(), "ZeroDivisionError: a bug of ours"),
        (RaisesAGroup(), "ZeroDivisionError: a bug of ours"),
        (Returns(), "Returns ended before the run did"),
        (Exits(), "CancelledError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_dead_producer_ends_the_run(producer, text):
    error, watch = ended(rig(producer=producer))
    assert isinstance(error, ProducerDied)
    assert text in str(error)
    assert watch.seconds < 0.05 + SLACK_S


def test_a_store_of_which_all_is_dropped_ends_the_run():
    error, watch = ended(rig(keep=lambda group: False, max_dropped=30))
    assert isinstance(error, Starved)
    assert "30 groups in a row" in str(error)
    assert "30 no_signal" in str(error)
    assert watch.seconds < SLACK_S


def test_no_group_in_time_ends_the_run():
    class NeverDone(Asks):
        async def run(self, task, chat) -> Outcome:
            await asyncio.Event().wait()
            raise AssertionError

    error, watch = ended(rig(environment=NeverDone(), take_timeout_s=0.3))
    assert isinstance(error, StoreTimeout)
    assert "train.group_timeout_s" in str(error)
    assert watch.wall_s >= 0.3
    assert watch.seconds < 0.3 + SLACK_S


# --- engines


class SilentFrom(Engine):
    """Answers `good` requests, then none."""

    def __init__(self, good: int) -> None:
        self.good = good

    async def generate(self, prompt_ids, sampling, *, session=None, on_token=None) -> Completion:
        self.good -= 1
        if self.good < 0:
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, sampling)


@pytest.mark.parametrize("good", [0, 9])
def test_an_engine_that_does_not_answer_ends_the_run(good):
    error, watch = ended(rig(engine=SilentFrom(good), engine_deadline_s=0.3))
    assert isinstance(error, EngineSilent)
    assert isinstance(error, TimeoutError)
    assert "engine.deadline_s = 0.3 s" in str(error)
    assert watch.wall_s >= 0.3
    assert watch.seconds < 0.3 + SLACK_S


def test_an_engine_that_dies_while_it_samples_ends_the_run_at_once():
    class Dies(Engine):
        requests = 0

        async def generate(self, prompt_ids, sampling, *, session=None, on_token=None) -> Completion:
            self.requests += 1
            await asyncio.sleep(0.02)
            if self.requests > 4:
                raise EngineError("engine: stopped by RuntimeError: out of memory")
            return await super().generate(prompt_ids, sampling)

    error, watch = ended(rig(engine=Dies()))
    assert type(error) is EngineError
    assert "out of memory" in str(error)
    assert watch.seconds < SLACK_S


class Deaf(Engine):
    """One of its methods never returns, from the second version on."""

    def __init__(self, method: str, from_version: int = 1) -> None:
        self.method, self.from_version = method, from_version

    async def _hang(self, method: str) -> None:
        if method == self.method and self.version >= self.from_version - 1:
            await asyncio.Event().wait()

    async def load(self, version: int) -> Served:
        await self._hang("load")
        return await super().load(version)

    async def sleep(self) -> None:
        await self._hang("sleep")

    async def wake(self) -> None:
        await self._hang("wake")


@pytest.mark.parametrize("from_version", [0, 1])
def test_an_engine_that_never_loads_ends_the_run(from_version):
    error, watch = ended(rig(engine=Deaf("load", from_version), sync_deadline_s=0.3))
    assert isinstance(error, SyncTimeout)
    assert "sync.deadline_s = 0.3 s" in str(error)
    assert f"version {from_version}" in str(error)
    assert watch.wall_s >= 0.3
    assert watch.seconds < 0.3 + SLACK_S


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_an_engine_that_never_sleeps_or_wakes_ends_the_run(method):
    error, watch = ended(rig(engine=Deaf(method), sync_deadline_s=0.3, max_lag=1, sync_every=2))
    assert isinstance(error, EngineSilent)
    assert method in str(error)
    assert watch.wall_s >= 0.3
    assert watch.seconds < 0.3 + SLACK_S


# --- bridges


def test_a_bridge_that_never_sends_ends_the_run():
    class Stuck(InprocBridge):
        def send(self, weights: Weights) -> Sent:
            time.sleep(0.8)  # a collective whose peer is gone; it has a longer deadline of its own
            return Sent(weights.version, self.mode, {})

    error, watch = ended(rig(bridge=Stuck(), sync_deadline_s=0.3))
    assert isinstance(error, SyncTimeout)
    assert watch.wall_s >= 0.3
    assert watch.seconds < 0.3 + SLACK_S


def test_a_bridge_that_breaks_ends_the_run_and_the_load_that_waits_for_it():
    class Broken(InprocBridge):
        def send(self, weights: Weights) -> Sent:
            raise SyncError("bridge: the other end hung up")

    error, watch = ended(rig(bridge=Broken(), engine=Deaf("load", 0)))
    assert type(error) is SyncError
    assert "hung up" in str(error)
    assert watch.seconds < SLACK_S


def test_a_timeout_inside_a_bridge_has_our_name_too():
    class Socket(InprocBridge):
        def send(self, weights: Weights) -> Sent:
            raise TimeoutError("timed out")

    error, watch = ended(rig(bridge=Socket(), engine=Deaf("load", 0)))
    assert isinstance(error, SyncTimeout)
    assert watch.seconds < SLACK_S


@pytest.mark.parametrize("lie", ["proof", "served"])
def test_an_engine_that_holds_another_version_ends_the_run(lie):
    class Lies(Engine):
        async def load(self, version: int) -> Served:
            proof = await super().load(version)
            if lie == "proof":
                return replace(proof, version=version - 1)
            self.version = version - 1
            return proof

    error, watch = ended(rig(engine=Lies()))
    assert type(error) is SyncError
    assert watch.seconds < SLACK_S
