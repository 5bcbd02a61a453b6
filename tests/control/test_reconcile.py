"""The loop: orphans, silent providers, refused launches, and a thousand runs after a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tandem.control import transitions
from tandem.control.decide import LAUNCH_MS, AttemptView, RunView
from tandem.control.reconcile import Reconciler
from tandem.control.store import Store
from tandem.control.tables import Attempt, Run
from tandem.errors import ProviderBusy, ProviderRefused, ProviderSilent
from tandem.job_types import Handle, Job, Need, Offer, Sight

PREFIX = "tandem-x-"


class Machines:
    """A provider whose jobs run until they are ended."""

    def __init__(self) -> None:
        self.jobs: dict[Handle, str] = {}
        self.silent, self.refuses, self.busy, self.asked = False, "", "", 0

    async def offers(self, need: Need) -> list[Offer]:
        return []

    async def launch(self, job: Job) -> Handle:
        if self.busy:
            raise ProviderBusy(self.busy)
        if self.refuses:
            raise ProviderRefused(self.refuses)
        self.jobs[Handle(job.name)] = "running"
        return Handle(job.name)

    async def find(self, prefix: str) -> list[Handle]:
        self.asked += 1
        if self.silent:
            raise ProviderSilent("no route to host")
        return [each for each in self.jobs if each.name.startswith(prefix)]

    async def look(self, handles: Sequence[Handle]) -> list[Sight]:
        self.asked += 1
        return [Sight(each, self.jobs[each]) for each in handles]  # type: ignore[arg-type]

    async def end(self, handle: Handle, grace_s: float) -> None:
        self.jobs[handle] = "ended"

    async def read(self, handle: Handle, path: str, offset: int, limit: int) -> bytes:
        return b""


@pytest.fixture
def machines() -> Machines:
    return Machines()


async def job_of(_: RunView, attempt: AttemptView) -> Job:
    return Job(attempt.name, ("agent",))


def loop_over(store: Store, machines: Machines, clock: Callable[[], int] = lambda: 1000) -> Reconciler:
    return Reconciler(store, {"box": machines}, job_of, prefix=PREFIX, clock=clock)


def submit(session: Session, count: int = 1) -> str:
    org = transitions.make_org(session, "one", 0)
    session.flush()
    return [transitions.submit(session, transitions.Submitted(org, "r", "", "box"), 0) for _ in range(count)][-1]


def passes(loop: Reconciler, count: int) -> None:
    async def all_of_them() -> None:
        for _ in range(count):
            await loop.pass_once()
            await asyncio.sleep(0)

    asyncio.run(all_of_them())


def states(session: Session) -> tuple[str, str]:
    run = session.scalars(sa.select(Run)).one()
    return run.state, run.why


def test_a_job_whose_attempt_is_closed_or_unknown_is_ended_and_no_other(store: Store, machines: Machines):
    run = asyncio.run(store.write(submit))
    loop = loop_over(store, machines)
    passes(loop, 2)
    mine = Handle(f"{PREFIX}{run}-1")
    unknown, foreign = Handle(f"{PREFIX}run_lost-1"), Handle("tandem-y-run-1")
    machines.jobs |= {unknown: "running", foreign: "running"}
    passes(loop, 2)
    assert machines.jobs == {mine: "running", unknown: "ended", foreign: "running"}
    asyncio.run(store.write(lambda session: session.execute(sa.update(Run).values(want="cancel", rev=Run.rev + 1))))
    passes(loop, 3)
    assert machines.jobs[mine] == "ended"
    assert asyncio.run(store.read(states))[0] == "cancelled"


def test_a_silent_provider_changes_nothing(store: Store, machines: Machines):
    asyncio.run(store.write(submit))
    loop = loop_over(store, machines)
    machines.silent = True
    passes(loop, 4)
    waits = ("starting", "target 'box' does not answer: no route to host")
    assert (asyncio.run(store.read(states)), machines.jobs) == (waits, {})
    without = Reconciler(store, {}, job_of, prefix=PREFIX, clock=lambda: 1000)
    passes(without, 1)
    assert asyncio.run(store.read(states))[1].endswith("not answer: this server's file of targets has it no more")
    machines.silent = False
    passes(loop, 2)
    assert (asyncio.run(store.read(states)), len(machines.jobs)) == (("starting", ""), 1)


def test_a_refused_launch_fails_the_run_with_the_providers_reason(store: Store, machines: Machines):
    asyncio.run(store.write(submit))
    machines.refuses = "partition 'gpu' does not exist"
    passes(loop_over(store, machines), 3)
    assert asyncio.run(store.read(states)) == ("failed", "partition 'gpu' does not exist")


def test_a_run_waits_for_as_long_as_its_machine_has_no_room(store: Store, machines: Machines):
    asyncio.run(store.write(submit))
    machines.busy, now = "jobs hold 2 of 2 CPUs", [1000]
    loop = loop_over(store, machines, lambda: now[0])
    for _ in range(6):
        now[0] += LAUNCH_MS // 2
        passes(loop, 2)
    assert asyncio.run(store.read(states)) == ("starting", "jobs hold 2 of 2 CPUs")
    machines.busy = ""
    passes(loop, 1)
    assert len(machines.jobs) == 1
    assert asyncio.run(store.read(lambda session: session.scalars(sa.select(Run.retries_left)).one())) == 3


def test_the_loop_runs_on_while_it_is_woken(store: Store, machines: Machines):
    async def until_launched() -> None:
        loop = loop_over(store, machines)
        task = asyncio.create_task(loop.run())
        await asyncio.sleep(0.05)
        await store.write(submit)
        loop.wake()
        async with asyncio.timeout(5):
            while not machines.jobs:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(until_launched())


@pytest.mark.slow
def test_a_thousand_runs_are_reconciled_in_five_seconds_after_a_restart(
    tmp_path: Path, database: str, machines: Machines
):
    store = Store(tmp_path, database)
    asyncio.run(store.write(partial(submit, count=1000)))
    passes(loop_over(store, machines), 2)
    assert len(machines.jobs) == 1000
    asyncio.run(
        store.write(
            lambda session: session.execute(
                sa.update(Attempt).values(
                    state="claimed", claimed_by="me", claimed_at=1, lease_until=10**12, moved_at=1000
                )
            )
        )
    )
    store.close()
    began = time.monotonic()
    store = Store(tmp_path, database)
    machines.asked = 0
    passes(loop_over(store, machines), 1)
    took_s = time.monotonic() - began
    assert asyncio.run(store.read(lambda s: s.scalar(sa.select(sa.func.count()).where(Run.state == "running")))) == 1000
    assert machines.asked == 2  # one listing and one look for all of them
    assert took_s <= 5.0, took_s
    store.close()
