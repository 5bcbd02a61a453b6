"""What the loop does next, for each state of a run, its attempt and its jobs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.control.decide import (
    GRACE_MS,
    LAUNCH_MS,
    LEASE_MS,
    POLL_MS,
    SILENT_MS,
    AttemptView,
    Close,
    Ending,
    EndJobs,
    Launch,
    Move,
    Note,
    OpenAttempt,
    Rest,
    RunView,
    Step,
    decide,
    wanted,
)
from tandem.job_types import Handle, Sight

NOW = 10_000_000
JOB, OTHER = Handle("job", "1"), Handle("job", "2")
QUEUED = RunView("run", "queued", "run")
STARTING = replace(QUEUED, state="starting", attempt_n=1)
RUNNING = replace(STARTING, state="running")
OPEN = AttemptView("attempt", 1, "job", "open", target="box", at=NOW - 1000)
NOTED = replace(OPEN, handle=JOB)
CLAIMED = replace(NOTED, state="claimed", claimed_at=NOW - 1000, lease_until=NOW + 1000, moved_at=NOW, limit_ms=1000)
HEARD = replace(CLAIMED, lease_until=NOW + LEASE_MS)
LAPSED = replace(CLAIMED, lease_until=NOW - 1)
CLOSED = replace(CLAIMED, state="closed")


def seen(*states: str) -> list[Sight]:
    return [Sight(handle, state) for handle, state in zip((JOB, OTHER), states, strict=False)]  # type: ignore[arg-type]


def asked(run: RunView, want: str, since_ms: int = 0) -> RunView:
    return replace(run, want=want, wanted_at=NOW - since_ms)


def ended(state: str, *, retriable: bool = False) -> AttemptView:
    return replace(CLAIMED, end=Ending(state, "it broke", retriable))  # type: ignore[arg-type]


CASES: dict[str, tuple[RunView, AttemptView | None, Sequence[Sight] | None, Step]] = {
    "a queued run opens its attempt before the provider is asked": (QUEUED, None, None, OpenAttempt(1)),
    "a run that waits rests until its time": (replace(QUEUED, state="waiting", wait_until=NOW + 1), CLOSED, [], Rest()),
    "a run that has waited opens the next attempt": (
        replace(QUEUED, state="waiting", wait_until=NOW, attempt_n=1), CLOSED, [], OpenAttempt(2),
    ),
    "a queued run that is cancelled ends": (asked(QUEUED, "cancel"), None, None, Move("cancelled")),
    "a waiting run that has spent what it may stops": (
        replace(QUEUED, state="waiting", max_cost_usd=2.0, spent_usd=2.0), CLOSED, [],
        Move("stopped", "it has cost what it may: max_cost_usd = 2"),
    ),
    "an ended run rests": (replace(QUEUED, state="succeeded", want="cancel"), CLOSED, seen("running"), Rest()),
    "no job is there: launch": (STARTING, OPEN, [], Launch()),
    "a silent provider is not asked to launch": (STARTING, OPEN, None, Rest()),
    "a job that was launched before a crash is noted": (STARTING, OPEN, seen("running"), Note(JOB)),
    "a job in the provider's queue is waited for": (STARTING, NOTED, seen("waiting"), Rest()),
    "no job appears for too long": (
        STARTING, replace(OPEN, at=NOW - LAUNCH_MS - 1), [],
        Close("waiting", "'box' started no job within 600 s", 5000),
    ),
    "a job that ended before it claimed is closed": (
        STARTING, NOTED, [Sight(JOB, "ended", 1)],
        Close("waiting", "its job ended before it claimed the attempt: ended with code 1", 5000),
    ),
    "another job of the same name may still claim": (STARTING, NOTED, seen("ended", "running"), Rest()),
    "an unknown job may still claim": (STARTING, NOTED, seen("unknown"), Rest()),
    "an attempt that is not claimed is cancelled by closing it": (
        asked(STARTING, "cancel"), NOTED, seen("running"), Close("cancelled"),
    ),
    "a claim makes the run running": (STARTING, CLAIMED, seen("running"), Move("running")),
    "a running run rests": (RUNNING, CLAIMED, seen("running"), Rest()),
    "the provider's word alone ends nothing": (RUNNING, CLAIMED, seen("gone"), Rest()),
    "a lease alone ends nothing": (RUNNING, LAPSED, seen("running"), Rest()),
    "an unknown job ends nothing": (RUNNING, LAPSED, seen("unknown"), Rest()),
    "a silent provider ends nothing": (RUNNING, LAPSED, None, Rest()),
    "but no cancel waits for it beyond the lease": (asked(RUNNING, "cancel"), LAPSED, None, Close("cancelled")),
    "before that it does": (asked(RUNNING, "cancel"), CLAIMED, None, Rest()),
    "a stop waits for it": (asked(RUNNING, "stop"), LAPSED, None, Rest()),
    "one of two jobs lives": (RUNNING, LAPSED, seen("ended", "running"), Rest()),
    "the lease has run out and no job is alive": (
        RUNNING, LAPSED, seen("gone"), Close("waiting", "its machine ended it, and its lease ran out: gone", 5000),
    ),
    "the last attempt is lost": (
        replace(RUNNING, retries_left=0), LAPSED, seen("gone"),
        Close("failed", "its machine ended it, and its lease ran out: gone; no attempt is left of 4"),
    ),
    "the wait doubles": (
        replace(RUNNING, retries_left=1), LAPSED, seen("gone"),
        Close("waiting", "its machine ended it, and its lease ran out: gone", 20_000),
    ),
    "its supervisor hangs": (
        RUNNING, replace(CLAIMED, moved_at=NOW - 2001), seen("running"), EndJobs((JOB,)),
    ),
    "a cancelled execution gets time to end": (asked(RUNNING, "cancel"), CLAIMED, seen("running"), Rest()),
    "an execution that does not end is ended": (
        asked(RUNNING, "cancel", GRACE_MS["cancel"] + 1), HEARD, seen("running"), EndJobs((JOB,)),
    ),
    "an agent that was told of a cancel gets its time": (
        asked(RUNNING, "cancel", SILENT_MS + 1), HEARD, seen("running"), Rest(),
    ),
    "an agent that cannot be told of a cancel is ended sooner": (
        asked(RUNNING, "cancel", SILENT_MS + 1), CLAIMED, seen("running"), EndJobs((JOB,)),
    ),
    "a stop leaves time for a checkpoint": (asked(RUNNING, "stop", GRACE_MS["cancel"] + 1), CLAIMED, seen("running"),
                                            Rest()),
    "a cancelled execution that is gone needs no lease": (
        asked(RUNNING, "cancel"), CLAIMED, seen("gone"), Close("cancelled"),
    ),
    "a cancelled execution whose job was never listed needs its lease": (asked(RUNNING, "cancel"), CLAIMED, [], Rest()),
    "success": (RUNNING, ended("succeeded"), seen("running"), Close("succeeded")),
    "success is success, cancelled or not": (asked(RUNNING, "cancel"), ended("succeeded"), [], Close("succeeded")),
    "a failure that may pass": (RUNNING, ended("failed", retriable=True), [], Close("waiting", "it broke", 5000)),
    "a failure that stays": (RUNNING, ended("failed"), [], Close("failed", "it broke")),
    "a failure after a cancel is a cancel": (asked(RUNNING, "cancel"), ended("failed", retriable=True), [],
                                             Close("cancelled")),
    "stopped as asked": (asked(RUNNING, "stop"), ended("stopped"), [], Close("stopped")),
    "stopped by its machine": (RUNNING, ended("stopped"), [], Close("waiting", "its machine asked it to end", 5000)),
}  # fmt: skip


@pytest.mark.parametrize(("run", "attempt", "sights", "step"), CASES.values(), ids=CASES.keys())
def test_the_next_step(run, attempt, sights, step):
    assert decide(run, attempt, sights, NOW) == step


def test_a_run_never_costs_more_than_a_poll_above_its_limit():
    for seed in range(100):
        check_costs(seed)


def check_costs(seed: int) -> None:
    """Its agent is told each second, or is silent; what it does to save and end takes its time; the loop ends what does
    not end by itself."""
    chance = random.Random(seed)
    usd_per_hour = chance.choice([0.5, 3.5, 98.0])
    left_s = chance.choice([chance.uniform(12.1, 60), chance.uniform(60, 3600), chance.uniform(3600, 100_000)])
    spent_usd = chance.choice([0.0, 1.25])
    owner = chance.choice(["run", "run", "stop"])  # a stop leaves ten minutes to save
    run = replace(RUNNING, max_cost_usd=spent_usd + left_s * usd_per_hour / 3600, spent_usd=spent_usd)
    attempt = replace(NOTED, state="claimed", claimed_at=NOW, usd_per_hour=usd_per_hour, lease_until=NOW + 10**9)
    silent, saves_s, end_at, wants = chance.random() < 0.3, chance.uniform(0, 900), float("inf"), list[str]()
    now = NOW + max(0, int((left_s - 320) * 1000))
    run = replace(run, want=owner, wanted_at=now)
    while now < end_at:
        now += chance.randrange(POLL_MS // 2, POLL_MS + 1)
        want, _ = wanted(run, attempt, now)
        if not silent and want != "run" and (not wants or wants[-1] != want):
            wants.append(want)
            end_at = min(end_at, now + (saves_s if want == "stop" else min(saves_s, 2.0)) * 1000)
        step = decide(run, attempt, seen("running"), now)
        if isinstance(step, EndJobs):
            end_at = min(end_at, now + 5_000)  # SIGKILL follows SIGTERM
        assert now < NOW + left_s * 1000 + 60_000, "nothing ends it"
    assert spent_usd + attempt.cost_usd(int(end_at)) <= run.max_cost_usd + usd_per_hour * POLL_MS / 3_600_000
    if not silent:
        ended_by = decide(run, replace(attempt, end=Ending("cancelled")), [], int(end_at))
        assert isinstance(ended_by, Close)
        assert ended_by.state == "stopped"


def test_a_run_is_asked_to_save_before_it_is_cancelled_for_its_costs():
    run = replace(RUNNING, max_cost_usd=1.0)
    attempt = replace(CLAIMED, claimed_at=NOW, usd_per_hour=1.0)
    at = {s: wanted(run, attempt, NOW + s * 1000)[0] for s in (3287, 3288, 3587, 3588, 3600)}
    assert at == {3287: "run", 3288: "stop", 3587: "stop", 3588: "cancel", 3600: "cancel"}
    assert wanted(asked(run, "cancel", 5), attempt, NOW)[0] == "cancel"
    little = replace(QUEUED, state="waiting", max_cost_usd=1.0, spent_usd=0.999, usd_per_hour=1.0)
    assert decide(little, CLOSED, [], NOW) == Move("stopped", "it has cost what it may: max_cost_usd = 1")
