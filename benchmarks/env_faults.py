"""Groups a second where a tenth of all episodes hang or crash, against none; and what is left when it is over.

python benchmarks/env_faults.py [--groups 96] [--share 0.1] [--rounds 3]

The engine is a stand-in with the latency and the room of a real one: REPLY_S for a reply, ROOM replies at once, so that
it is the bottleneck as it would be. Everything else is what a run has: workers, recorder, producer, store. Faults come
between the two replies of an episode, drawn anew for each try: a wait without end, a blocking sleep, an exit, a
segmentation fault. An episode's second try counts; a group whose episode fails twice is dropped. Exit code 1 if a
figure is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import random
import statistics
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import note, table
from tandem.env.sandbox.outside import Sandbox
from tandem.rollout.episode import Setting
from tandem.rollout.producer import EnvironmentProducer
from tandem.rollout.store import MemoryStore
from tandem.rollout.workers.forkserver_client import Order
from tandem.rollout.workers.pool import WorkerEnvironment
from tandem.types import Completion, Outcome, Sampling, Span, Task

REPLY_S, ROOM = 0.25, 16
EPISODE_TIMEOUT_S = 1.0
WORKERS, GROUP_SIZE, GROUPS_PER_STEP, SLOTS = 40, 4, 4, 32
MARK = "TANDEM_BENCHMARK_MARK"
LEAST_SHARE = 0.85


@dataclass(frozen=True)
class Flaky:
    """Loaded by the workers, from this file."""

    share: float = 0.0

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}-{index}", ({"role": "user", "content": "?"},)) for index in range(1000)]

    async def run(self, task: Task, chat: Any) -> Outcome:
        await chat.reply()
        if random.random() < self.share:
            await random.choice((self._waits, self._blocks, self._exits, self._faults))()
        chat.say("and?")
        reply = await chat.reply()
        return Outcome(float(len(reply.text)))

    async def _waits(self) -> None:
        await asyncio.Event().wait()

    async def _blocks(self) -> None:
        time.sleep(1000)

    async def _exits(self) -> None:
        os._exit(1)

    async def _faults(self) -> None:
        ctypes.string_at(0)


class Engine:
    version = 0

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(ROOM)

    async def generate(self, prompt_ids, sampling, *, session=None, on_token=None) -> Completion:
        async with self._room:
            await asyncio.sleep(REPLY_S)
        return Completion([7], [-0.5], [Span(0, 1)], "stop")


class Plain:
    def prompt(self, messages) -> list[int]:
        return [0]

    def glue(self, messages, last_id: int) -> list[int]:
        return [0]

    def visible(self, ids, stop=()) -> str:
        return "seven"

    def thought(self, ids, stop=()) -> None:
        return None


@dataclass(frozen=True)
class Measured:
    groups_per_s: float
    retried: Counter[str]
    dropped: Counter[str]
    restarts: Counter[str]
    orphans: int

    @property
    def faults(self) -> int:
        return self.retried.total() + self.dropped.total()


def measure(share: float, groups: int, sandbox: Sandbox | None = None) -> Measured:
    mark = os.environ[MARK] = uuid.uuid4().hex
    order = Order(__file__, {"share": share}, EPISODE_TIMEOUT_S, pass_env=(MARK,), sandbox=sandbox)
    rate, producer, store, environment = asyncio.run(_run(order, groups))
    metrics = producer.drain_metrics()
    prefix = "episodes/retried/"
    retried = Counter({key.removeprefix(prefix): int(n) for key, n in metrics.items() if key.startswith(prefix)})
    del os.environ[MARK]
    return Measured(rate, retried, store.dropped, environment.restarts, len(marked(mark)))


async def _run(order: Order, groups: int) -> tuple[float, EnvironmentProducer, MemoryStore, WorkerEnvironment]:
    environment = WorkerEnvironment(order, WORKERS)
    store = MemoryStore(SLOTS, take_timeout_s=60.0)
    setting = Setting(environment, Engine(), Plain(), Sampling(), 64, 30.0, EPISODE_TIMEOUT_S, retries=1)  # pyright: ignore
    producer = EnvironmentProducer(setting, store, lambda _: True, group_size=GROUP_SIZE, seed=0, max_failed_share=1.0)
    running = asyncio.create_task(producer.run())
    try:
        await _take(store)  # the start is nobody's throughput
        started, taken = time.perf_counter(), 0
        while taken < groups:
            taken += await _take(store)
        rate = taken / (time.perf_counter() - started)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        environment.close()
        await asyncio.sleep(0)
    return rate, producer, store, environment


async def _take(store: MemoryStore) -> int:
    taken = await store.take(GROUPS_PER_STEP)
    await store.release(len(taken))
    return len(taken)


def marked(mark: str) -> list[int]:
    """Processes that carry the mark in their environment variables, however far from their parents."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=96)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    runs = [(measure(0.0, asked.groups), measure(asked.share, asked.groups)) for _ in range(asked.rounds)]
    rows = [
        [name, f"{m.groups_per_s:.2f}", f"{m.groups_per_s / pair[0].groups_per_s:.2f}", str(m.retried.total()),
         " ".join(f"{kind} {count}" for kind, count in m.dropped.items()) or "0", str(m.restarts.total()),
         str(m.orphans)]
        for pair in runs
        for name, m in zip(("clean", f"{asked.share:.0%} faults"), pair, strict=True)
    ]  # fmt: skip
    table(["", "groups/s", "of clean", "played again", "groups dropped", "workers replaced", "orphans"], rows)
    best = statistics.median(faulty.groups_per_s / clean.groups_per_s for clean, faulty in runs)
    orphans = sum(each.orphans for pair in runs for each in pair)
    note(f"median {best:.2f} of clean, must be >= {LEAST_SHARE}; {orphans} orphans, must be 0")
    sys.exit(0 if best >= LEAST_SHARE and orphans == 0 else 1)


if __name__ == "__main__":
    main()
