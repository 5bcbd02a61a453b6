"""Crash the control plane's loop at every boundary: `python benchmarks/control_crashes.py --trials 2000`.

Each trial runs seven runs to their end in a simulated world. The loop, the decisions, the transitions and the database
are the real ones. A crash is planted before or after any commit of the loop and any call of its provider; then a new
loop starts on what the database holds. Meanwhile the world goes on: the provider starts a job and loses the answer,
lists jobs late, is silent for a while, or starts a job again by itself; agents cannot reach the database for a while,
die without a word, or hear nothing of a cancel. What must hold is checked after each tick and at the end. --plant puts
in a design or an agent that breaks a rule; the checks must find it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tandem.control import transitions
from tandem.control.decide import AttemptView, Close, Ending, RunView, Step, decide
from tandem.control.reconcile import Reconciler
from tandem.control.store import Store
from tandem.control.tables import Attempt, Event, Run, Usage
from tandem.errors import Conflict, Fenced, MaybeLaunched, ProviderSilent
from tandem.job_types import Handle, Job, Need, Offer, Sight

TICK_MS, MOST_TICKS, PREFIX = 10_000, 250, "tandem-trial-"
PLANTS = ("", "provider-decides", "claim-ignored", "close-unchecked")
"""The usual design, where the provider's word ends an attempt; agents that train whatever their claim is answered; a
close that does not look whether the attempt was claimed since it was read."""

FATES = {
    ("retried", 1): "infra", ("wrong", 1): "user", ("hopeless", 1): "infra", ("hopeless", 2): "infra",
    ("hopeless", 3): "infra", ("hopeless", 4): "infra", ("killed", 1): "dies", ("restarted", 1): "restarts",
}  # fmt: skip
"""What happens to an attempt of a run; all others train to their end."""
EXPECTED = {
    "plain": ("succeeded", 1), "retried": ("succeeded", 2), "wrong": ("failed", 1), "hopeless": ("failed", 4),
    "killed": ("succeeded", 2), "restarted": ("succeeded", 2),
}  # fmt: skip
"""Run: its end and how many attempts it takes, exactly. `cancelled` may also succeed before its cancel."""
RUNS = (*EXPECTED, "cancelled")


class Crash(BaseException):
    """The control plane's process ends here."""


@dataclass
class Execution:
    """One process on a machine."""

    instance: str
    left: int
    claimed: bool = False
    trains: bool = False
    word: Ending | None = None


@dataclass
class SimulatedJob:
    handle: Handle
    execution: Execution
    fate: str
    late: int
    """Ticks until the provider lists it."""
    boots: int
    """Ticks until its agent runs."""
    state: str = "running"
    deaf: bool = False
    """Its agent does not obey a cancel."""


@dataclass
class World:
    """A provider and its machines. It outlives every loop."""

    rng: random.Random
    store: Store
    names: dict[str, str] = field(default_factory=dict[str, str])
    plant: str = ""
    jobs: dict[Handle, SimulatedJob] = field(default_factory=dict[Handle, SimulatedJob])
    now: int = 1_000_000
    began: Counter[str] = field(default_factory=Counter[str])
    """Executions that trained, by the name of their attempt."""
    trained: Counter[str] = field(default_factory=Counter[str])
    """Runs that were trained to their end."""
    problems: list[str] = field(default_factory=list[str])
    instances: int = 0
    ticking: asyncio.Lock = field(default_factory=asyncio.Lock)

    # --- the provider

    def launch(self, job: Job) -> Handle:
        handle = Handle(job.name, f"job-{len(self.jobs) + 1}")
        fate = FATES.get((self.run_of(job.name), int(job.name.rpartition("-")[2])), "trains")
        self.jobs[handle] = SimulatedJob(
            handle, self.execution(), fate, late=self.rng.randint(0, 3), boots=self.rng.randint(0, 3),
            deaf=self.rng.random() < 0.5,
        )  # fmt: skip
        if self.rng.random() < 0.1:
            raise MaybeLaunched("it took effect, and the answer was lost")
        return handle

    def find(self) -> list[Handle]:
        if self.rng.random() < 0.05:
            raise ProviderSilent("no answer")
        return [handle for handle, job in self.jobs.items() if job.late <= 0]

    def look(self, handles: Sequence[Handle]) -> list[Sight]:
        silent = self.rng.random() < 0.05
        return [Sight(each, "unknown" if silent else self.jobs[each].state) for each in handles]  # type: ignore[arg-type]

    def end(self, handle: Handle) -> None:
        job = self.jobs[handle]
        job.state, job.execution.trains = "ended", False

    # --- the machines

    def execution(self) -> Execution:
        self.instances += 1
        return Execution(f"execution-{self.instances}", self.rng.randint(1, 3))

    def run_of(self, name: str) -> str:
        return self.names[name.removeprefix(PREFIX).rpartition("-")[0]]

    async def tick(self) -> None:
        async with self.ticking:
            await self._tick()

    async def _tick(self) -> None:
        self.now += TICK_MS
        for job in self.jobs.values():
            job.late -= 1
        await asyncio.gather(*(self.live_on(job) for job in self.jobs.values() if job.state == "running"))
        for run, count in Counter(
            self.run_of(job.handle.name) for job in self.jobs.values() if job.execution.trains
        ).items():
            if count > 1:
                self.problems.append(f"{run}: {count} executions train at once")

    async def live_on(self, job: SimulatedJob) -> None:
        """One tick of an execution: claim first, then train, telling so; at the end, say how it ended."""
        mine, name = job.execution, job.handle.name
        job.boots -= 1
        if job.boots >= 0:
            return
        if self.rng.random() < 0.1 and mine.claimed:
            mine.left -= mine.left > 1  # it cannot reach the control plane, and trains on
            return
        try:
            attempt = await self.store.read(partial(_attempt_id, name=name))
            if not mine.claimed:
                await self.claim(job, attempt)
            if mine.word is not None:
                await self.store.write(
                    partial(transitions.end, attempt_id=attempt, instance=mine.instance, ending=mine.word, now=self.now)
                )
                job.state = "ended"
                return
            want = await self.store.write(
                partial(
                    transitions.renew, attempt_id=attempt, instance=mine.instance, ticks=self.now, limit_ms=0,
                    now=self.now,
                )
            )  # fmt: skip
        except (Conflict, Fenced):
            job.state, mine.trains = "ended", False
            return
        self.train(job, "run" if job.deaf else want)

    async def claim(self, job: SimulatedJob, attempt: str) -> None:
        mine = job.execution
        try:
            await self.store.write(partial(transitions.claim, attempt_id=attempt, instance=mine.instance, now=self.now))
        except Conflict:
            if self.plant != "claim-ignored":
                raise
        mine.claimed = mine.trains = True
        self.began[job.handle.name] += 1

    def train(self, job: SimulatedJob, want: str) -> None:
        mine = job.execution
        mine.left -= 1
        if want != "run":
            mine.word, mine.trains = Ending("cancelled"), False
        elif mine.left <= 0:
            mine.trains = False
            match job.fate:
                case "dies":
                    job.state = "gone"
                case "restarts":  # as Slurm does after a crash of its controller: the same job id, another execution
                    job.execution, job.fate = self.execution(), "trains"
                case "trains":
                    self.trained[self.run_of(job.handle.name)] += 1
                    mine.word = Ending("succeeded")
                case fate:
                    mine.word = Ending("failed", fate, retriable=fate == "infra")


class Points:
    """Counts the boundaries, and crashes at one of them."""

    def __init__(self, crash_at: int) -> None:
        self.crash_at, self.count, self.crashed = crash_at, 0, False

    def __call__(self) -> None:
        self.count += 1
        if self.crashed or self.count == self.crash_at:
            self.crashed = True
            raise Crash


class CrashingStore:
    def __init__(self, world: World, point: Points) -> None:
        self.world, self.store, self.point, self.read = world, world.store, point, world.store.read

    async def write(self, change: Any) -> Any:
        self.point()
        if self.world.rng.random() < 0.1:  # the agents are faster than the loop, which has read already
            await asyncio.shield(asyncio.ensure_future(self.world.tick()))
        result = await self.store.write(change)
        self.point()
        return result


class CrashingProvider:
    def __init__(self, world: World, point: Points) -> None:
        self.world, self.point = world, point

    async def offers(self, need: Need) -> list[Offer]:
        return []

    async def launch(self, job: Job) -> Handle:
        self.point()
        handle = self.world.launch(job)
        self.point()
        return handle

    async def find(self, prefix: str) -> list[Handle]:
        self.point()
        return self.world.find()

    async def look(self, handles: Sequence[Handle]) -> list[Sight]:
        self.point()
        return self.world.look(handles)

    async def end(self, handle: Handle, grace_s: float) -> None:
        self.point()
        self.world.end(handle)
        self.point()

    async def read(self, handle: Handle, path: str, offset: int, limit: int) -> bytes:
        return b""


def provider_decides(run: RunView, attempt: AttemptView | None, sights: Sequence[Sight] | None, now: int) -> Step:
    """The usual design: when the job that was started is over, so is the attempt."""
    if attempt is not None and attempt.state != "closed" and attempt.end is None and attempt.handle is not None:
        for sight in sights or ():
            if sight.handle == attempt.handle and sight.state in ("ended", "gone") and run.want == "run":
                return Close("waiting", "its job ended") if run.retries_left > 0 else Close("failed", "its job ended")
    return decide(run, attempt, sights, now)


@dataclass
class Trial:
    crashes: int
    duplicates: int
    problems: list[str]


async def trial(store: Store, seed: int, crash_at: int, plant: str = "") -> Trial:
    rng = random.Random(f"{seed}/{crash_at}")
    world = World(rng, store, plant=plant)
    await store.write(partial(_begin, names=world.names, now=world.now))
    cancel_at, crashes = rng.randint(0, 8), 0
    point = Points(crash_at)
    loop = _loop(world, point, plant)
    for tick in range(MOST_TICKS):
        if tick == cancel_at:
            await store.write(partial(_cancel, now=world.now))
        try:
            await loop.pass_once()
        except (Crash, BaseExceptionGroup) as error:
            if isinstance(error, BaseExceptionGroup) and error.split(Crash)[1] is not None:
                raise
        await asyncio.sleep(0)  # ends that the loop began
        if point.crashed:
            crashes += 1
            await loop.close()
            point = Points(rng.randint(1, 25) if rng.random() < 0.5 else -1)
            loop = _loop(world, point, plant)
        await world.tick()
        none_runs = not any(job.state == "running" for job in world.jobs.values())
        if tick > cancel_at and none_runs and not await store.read(transitions.live):
            break
    await loop.close()
    problems = [*dict.fromkeys(world.problems), *await store.read(partial(_problems, world=world))]
    return Trial(crashes, len(world.jobs) - len({handle.name for handle in world.jobs}), problems)


async def job_of(_: RunView, attempt: AttemptView) -> Job:
    return Job(attempt.name, ("agent",))


def _loop(world: World, point: Points, plant: str) -> Reconciler:
    rule = provider_decides if plant == "provider-decides" else decide
    real: Any = CrashingStore(world, point)
    return Reconciler(
        real, {"world": CrashingProvider(world, point)}, job_of, prefix=PREFIX,
        clock=lambda: world.now, decide=rule,
    )  # fmt: skip


def _begin(session: Session, names: dict[str, str], now: int) -> None:
    for table in (Usage, Event, Attempt, Run):
        session.execute(sa.delete(table))
    org = transitions.make_org(session, "trial", now)
    session.flush()
    for name in RUNS:
        names[transitions.submit(session, transitions.Submitted(org, name, "", "world", usd_per_hour=2.0), now)] = name


def _cancel(session: Session, now: int) -> None:
    run = session.scalars(sa.select(Run).where(Run.name == "cancelled")).one()
    transitions.ask_to_end(session, run.org, run.id, "cancel", now)


def _attempt_id(session: Session, name: str) -> str:
    return session.scalars(sa.select(Attempt.id).where(Attempt.name == name)).one()


def _problems(session: Session, world: World) -> list[str]:
    """What does not hold after a trial."""
    found: list[str] = []
    for run in session.scalars(sa.select(Run)):
        ended = (run.state, run.attempt_n)
        if run.name in EXPECTED and ended != EXPECTED[run.name]:
            found.append(f"{run.name}: {ended}, not {EXPECTED[run.name]}: {run.why}")
        if run.name == "cancelled" and (run.state not in ("cancelled", "succeeded") or run.attempt_n > 1):
            found.append(f"cancelled: {ended}: {run.why}")
        if world.trained[run.name] != (run.state == "succeeded") and run.name != "cancelled":
            found.append(f"{run.name}: {run.state}, and trained to its end {world.trained[run.name]} times")
    found += [f"{name}: {count} executions of one attempt trained" for name, count in world.began.items() if count > 1]
    found += [f"{job.handle.name} still runs" for job in world.jobs.values() if job.state == "running"]
    attempts = session.scalars(sa.select(Attempt)).all()
    found += [f"{each.name} is {each.state}" for each in attempts if each.state != "closed"]
    used = {row.key: row.ended - row.began for row in session.scalars(sa.select(Usage))}
    claimed = {
        f"{each.id}:compute": (each.ended_at or min(each.closed_at, each.lease_until)) - each.claimed_at
        for each in attempts
        if each.claimed_at
    }
    if used != claimed:
        found.append(f"usage {used} is not that of the attempts, {claimed}")
    for run in session.scalars(sa.select(Run)):
        numbers = session.scalars(sa.select(Event.n).where(Event.run == run.id).order_by(Event.n)).all()
        if list(numbers) != list(range(1, run.event_n + 1)):
            found.append(f"{run.name}: events {numbers}")
    return found


async def many(store: Store, trials: int, plant: str = "", *, first: int = 0) -> list[Trial]:
    """Crash at boundary 1, 2, ... 60 with one seed, then with the next."""
    return [await trial(store, number // 60, number % 60 + 1, plant) for number in range(first, first + trials)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--database", default="", help="URL of a PostgreSQL database; default: SQLite")
    parser.add_argument("--plant", choices=PLANTS, default="", help="a bug that the checks must find")
    asked = parser.parse_args()
    if asked.plant == "close-unchecked":
        unchecked_close()
    logging.disable(logging.ERROR)  # a silent provider is nothing special here
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory), asked.database)
        done = asyncio.run(many(store, asked.trials, asked.plant))
        dialect = store.engine.dialect.name
        store.close()
    wrong = [each for each in done if each.problems]
    print(
        f"{dialect}: {len(done)} trials, {sum(each.crashes for each in done)} crashes, "
        f"{sum(each.duplicates for each in done)} duplicate launches, {len(wrong)} wrong, "
        f"{time.monotonic() - began:.0f} s"
    )
    for each in wrong[:5]:
        print("  " + "; ".join(each.problems[:3]))
    sys.exit(bool(wrong) != bool(asked.plant))


def unchecked_close() -> None:
    """Plant a close that does not look whether the attempt is as it was read."""
    checked = transitions._set_attempt

    def unchecked(session: Session, attempt_id: str, where: Any, **values: Any) -> bool:
        return checked(session, attempt_id, sa.true() if values.get("state") == "closed" else where, **values)

    transitions._set_attempt = unchecked


if __name__ == "__main__":
    main()
