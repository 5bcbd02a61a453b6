"""What to do next for a run: a pure function of its row, its newest attempt, and what the provider sees.

run:     queued -> starting -> running -> succeeded | failed | cancelled | stopped; waiting: before a further attempt
attempt: open -> claimed -> closed, or open -> closed

Two rules that no provider can break:
1. An execution trains only after it claimed the attempt in the database. One row, one winner.
2. A further attempt begins only in the transaction that closes the one before. A late claim then fails, and an agent
   whose attempt was closed ends its trainer.

A provider may list a job late, start it twice, or lose it. So what it says ends an attempt only where rule 1 makes that
safe: an attempt that was never claimed is closed once none of its jobs is alive; a claimed one, once its lease has run
out and none of its jobs is alive. `unknown` counts as alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tandem.job_types import Handle, Sight

RunState = Literal["queued", "starting", "running", "waiting", "succeeded", "failed", "cancelled", "stopped"]
EndState = Literal["succeeded", "failed", "cancelled", "stopped"]
Want = Literal["run", "stop", "cancel"]

ENDED: tuple[RunState, ...] = ("succeeded", "failed", "cancelled", "stopped")
LAUNCH_MS = 600_000
"""How long a job may be asked for, without a sign that it exists."""
GRACE_MS = {"stop": 600_000, "cancel": 6_000}
"""How long an agent may take to end after it was asked; then the provider ends its jobs. `stop` saves a checkpoint."""
SILENT_MS = 3_000
"""How long one that cannot be told of a cancel, since it is not heard, may go on. It asks each second."""
LEASE_MS = 60_000
"""How long an agent may be silent. It renews every second."""
WAITS_MS = (5_000, 300_000)
"""Before the first further attempt, and at most; doubled in between."""
POLL_MS = 1_000
"""Between two passes of the loop."""
KILL_MS = 12_000
"""Before a run would have cost what it may, its execution is cancelled: time for GRACE_MS, for the provider to end what
did not end by itself, and for a poll."""
SAVE_MS = 300_000
"""Before that it is asked to save and end: this long before, or a tenth of the time that it can pay for."""


@dataclass(frozen=True, slots=True)
class RunView:
    """What `decide` needs to know of a run."""

    id: str
    state: RunState
    want: Want
    rev: int = 0
    attempt_n: int = 0
    retries: int = 3
    retries_left: int = 3
    wait_until: int = 0
    wanted_at: int = 0
    max_cost_usd: float = 0.0
    """0: no limit."""
    spent_usd: float = 0.0
    """By closed attempts."""
    spec_toml: str = field(default="", repr=False)
    usd_per_hour: float = 0.0
    serves: bool = False
    """It is the replica of a deployment."""
    why: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Ending:
    """How the claimed execution says that it ended."""

    state: EndState
    why: str = ""
    retriable: bool = False


@dataclass(frozen=True, slots=True)
class AttemptView:
    """What `decide` needs to know of a run's newest attempt."""

    id: str
    n: int
    name: str
    state: Literal["open", "claimed", "closed"]
    target: str = ""
    at: int = 0
    handle: Handle | None = None
    claimed_at: int = 0
    lease_until: int = 0
    moved_at: int = 0
    limit_ms: int = 0
    usd_per_hour: float = 0.0
    end: Ending | None = None

    def cost_usd(self, until: int) -> float:
        return max(0, until - self.claimed_at) / 3_600_000 * self.usd_per_hour if self.claimed_at else 0.0


# --- steps


@dataclass(frozen=True, slots=True)
class Rest:
    """There is nothing to do."""


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """Write the row of attempt `n`."""

    n: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Ask the provider to start the attempt's job."""


@dataclass(frozen=True, slots=True)
class Note:
    """Write down where the job is."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class EndJobs:
    """Ask the provider to end these jobs. The database stays as it is: a later pass sees them gone."""

    handles: tuple[Handle, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Write the run's state. A run that moves to an end has no attempt that is not closed."""

    state: RunState
    why: str = ""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the attempt and write the run's state, in one transaction. `wait_ms`: until a further attempt."""

    state: RunState
    why: str = ""
    wait_ms: int = 0


Step = Rest | OpenAttempt | Launch | Note | EndJobs | Move | Close


def decide(run: RunView, attempt: AttemptView | None, sights: Sequence[Sight] | None, now: int) -> Step:
    """Return the next step. `sights`: of the attempt's jobs, by its name and its handle; None: the provider does not
    answer."""
    if run.state in ENDED:
        return Rest()
    if attempt is None or attempt.state == "closed":
        if run.want != "run":
            return Move(_as_wanted(run.want))
        if not pays_for_more(run.max_cost_usd - run.spent_usd, run.max_cost_usd, run.usd_per_hour):
            return Move("stopped", _cost_reached(run, "stop"))
        return OpenAttempt(run.attempt_n + 1) if now >= run.wait_until else Rest()
    if attempt.end is not None:
        return _after_its_end(run, attempt, attempt.end, now)
    if attempt.state == "claimed":
        return _claimed(run, attempt, sights, now)
    return _unclaimed(run, attempt, sights, now)


def wanted(run: RunView, attempt: AttemptView, now: int) -> tuple[Want, int]:
    """Return what the execution should do, and since when: what the owner wants, or what the run's costs demand. `stop`
    saves first, and may take minutes; so `cancel` follows early enough that the run never costs more than it may."""
    by_cost, due = _wanted_by_cost(run, attempt, now)
    if run.want == "cancel" or (run.want == "stop" and by_cost != "cancel"):
        return run.want, run.wanted_at
    return by_cost, due


def pays_for_more(left_usd: float, max_cost_usd: float, usd_per_hour: float) -> bool:
    """Return whether what is left pays for an execution that has to be cancelled before it is spent."""
    return not max_cost_usd or (left_usd > 0 and left_usd * 3_600_000 > KILL_MS * usd_per_hour)


@dataclass(frozen=True, slots=True)
class CostTimes:
    """When an execution must save and end, when it is cancelled, and when it has cost all that its run may."""

    stop_at: int
    cancel_at: int
    spent_at: int


def cost_times(run: RunView, attempt: AttemptView) -> CostTimes | None:
    """None if there is no limit."""
    if not (run.max_cost_usd and attempt.usd_per_hour and attempt.claimed_at):
        return None
    left_ms = int((run.max_cost_usd - run.spent_usd) / attempt.usd_per_hour * 3_600_000)
    spent_at = attempt.claimed_at + left_ms
    cancel_at = spent_at - KILL_MS
    return CostTimes(cancel_at - min(SAVE_MS, left_ms // 10), cancel_at, spent_at)


def _wanted_by_cost(run: RunView, attempt: AttemptView, now: int) -> tuple[Want, int]:
    times = cost_times(run, attempt)
    if times is None or now < times.stop_at:
        return "run", 0
    return ("cancel", times.cancel_at) if now >= times.cancel_at else ("stop", times.stop_at)


def _unclaimed(run: RunView, attempt: AttemptView, sights: Sequence[Sight] | None, now: int) -> Step:
    if run.want != "run":
        return Close(_as_wanted(run.want))  # jobs of a closed attempt are ended as orphans, and can claim nothing
    if sights is None:
        return Rest()
    if not sights:
        if now - attempt.at > LAUNCH_MS:
            return _again(run, f"'{attempt.target}' started no job within {LAUNCH_MS // 1000} s", now)
        return Launch()
    if attempt.handle is None:
        return Note(sights[0].handle)
    if _alive(sights):
        return Rest()
    return _again(run, f"its job ended before it claimed the attempt: {_told(sights)}", now)


def _claimed(run: RunView, attempt: AttemptView, sights: Sequence[Sight] | None, now: int) -> Step:
    if run.state != "running":
        return Move("running")
    want, since = wanted(run, attempt, now)
    lapsed = now > attempt.lease_until
    gone = sights is not None and not _alive(sights)
    if want != "run":
        given_up = sights is None and lapsed and want == "cancel"  # its target may never answer again
        if (gone and (sights or lapsed)) or given_up:
            return Close(_as_wanted(run.want), _cost_reached(run, want))
        told = want == "stop" or attempt.lease_until - LEASE_MS >= since
        return _end_jobs(sights) if now - since > (GRACE_MS[want] if told else SILENT_MS) else Rest()
    if gone and lapsed:
        return _again(run, f"its machine ended it, and its lease ran out: {_told(sights or ())}", now)
    if attempt.limit_ms and now - attempt.moved_at > 2 * attempt.limit_ms:  # its supervisor should have ended it
        return _end_jobs(sights)
    return Rest()


def _after_its_end(run: RunView, attempt: AttemptView, end: Ending, now: int) -> Step:
    if end.state == "succeeded":
        return Close("succeeded")
    want, _ = wanted(run, attempt, now)
    if want != "run":
        return Close(_as_wanted(run.want), _cost_reached(run, want))
    if end.state == "stopped":
        return _again(run, "its machine asked it to end", now)
    return _again(run, end.why, now) if end.retriable else Close("failed", end.why or f"its agent says: {end.state}")


def _again(run: RunView, why: str, now: int) -> Step:
    if run.retries_left <= 0:
        return Close("failed", f"{why}; no attempt is left of {run.retries + 1}")
    first_ms, most_ms = WAITS_MS
    return Close("waiting", why, min(first_ms * 2 ** (run.retries - run.retries_left), most_ms))


def _end_jobs(sights: Sequence[Sight] | None) -> Step:
    alive = tuple(sight.handle for sight in sights or () if sight.state in ("waiting", "running"))
    return EndJobs(alive) if alive else Rest()


def _alive(sights: Sequence[Sight]) -> bool:
    return any(sight.state in ("waiting", "running", "unknown") for sight in sights)


def _told(sights: Sequence[Sight]) -> str:
    told = [f"{sight.state}{'' if sight.code is None else f' with code {sight.code}'} {sight.why}" for sight in sights]
    return "; ".join(each.strip() for each in told) or "the provider has no job of this name"


def _as_wanted(want: Want) -> EndState:
    """Return how a run ends that its owner wants to end so; one that its costs end is stopped, and can be resumed."""
    return "cancelled" if want == "cancel" else "stopped"


def _cost_reached(run: RunView, want: Want) -> str:
    return "" if run.want == want else f"it has cost what it may: max_cost_usd = {run.max_cost_usd:g}"
