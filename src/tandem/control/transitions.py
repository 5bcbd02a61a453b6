"""Every change of a run or an attempt. Each function is one change of the store: all of it is written, or nothing.

A caller submits, asks to end and resumes. An agent claims, renews and ends. The loop opens, notes, moves and closes. An
UPDATE names what its writer has read; where it changes no row, another writer was first, and the change raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tandem.control.decide import (
    ENDED,
    LEASE_MS,
    AttemptView,
    Ending,
    EndState,
    RunState,
    RunView,
    Want,
    cost_times,
    pays_for_more,
    wanted,
)
from tandem.control.ids import new_id
from tandem.control.tables import Attempt, Event, Org, Project, Run, Usage
from tandem.control.vault import check_there
from tandem.errors import Conflict, Fenced, NotKnown
from tandem.job_types import Handle
from tandem.shapes.agent import CostLimits

_RUNS, _ATTEMPTS, _USAGE, _EVENTS = (cast("sa.Table", each.__table__) for each in (Run, Attempt, Usage, Event))


# --- a caller


@dataclass(frozen=True, slots=True)
class Submitted:
    """What a caller submits. `spec_toml` was checked before."""

    org: str
    name: str
    spec_toml: str
    target: str
    project: str = ""
    group: str = ""
    created_by: str = ""
    usd_per_hour: float = 0.0
    max_cost_usd: float = 0.0
    retries: int = 3
    secrets: tuple[str, ...] = ()
    serves: dict[str, Any] | None = None
    """The run and step whose weights it serves, for a replica."""


def make_org(session: Session, name: str, now: int) -> str:
    """Return the id of the org of this name; make it if there is none."""
    known = session.scalar(sa.select(Org.id).where(Org.name == name))
    if known is not None:
        return known
    session.add(Org(id=(made := new_id("org")), at=now, name=name))
    return made


def submit(session: Session, asked: Submitted, now: int) -> str:
    """Queue a run; return its id. Conflict if its project's budget or number of runs does not allow it, or
    if a secret that it names is not there."""
    if not pays_for_more(asked.max_cost_usd, asked.max_cost_usd, asked.usd_per_hour):
        seconds = asked.max_cost_usd / asked.usd_per_hour * 3600
        raise Conflict(
            f"max_cost_usd = {asked.max_cost_usd:g}: pays for {seconds:.0f} s on '{asked.target}' "
            f"({asked.usd_per_hour:g} USD an hour), too little for a run; give more",
            field="max_cost_usd",
        )
    _check_room(session, asked.project, asked.max_cost_usd)
    check_there(session, asked.org, asked.project, asked.secrets)
    run = Run(
        id=new_id("run"), at=now, **asdict(asked), retries_left=asked.retries, want="run", wanted_at=now,
        state="queued", why="", wait_until=0, attempt_n=0, event_n=0, rev=0, ended_at=0,
    )  # fmt: skip
    session.add(run)
    session.flush()
    _tell(session, run.id, now, "state", state="queued")
    return run.id


def _check_room(session: Session, project_id: str, usd: float) -> None:
    """Conflict if a further run that may cost `usd` does not fit into its project. A run on its way counts with all
    that it may cost, an ended one with what it did cost: the transaction of a submit reserves its budget."""
    project = session.get(Project, project_id, with_for_update=True)
    if project is None or not (project.budget_usd or project.max_live_runs):
        return
    of_project = Run.project == project_id
    num_live = session.scalar(sa.select(sa.func.count()).where(of_project, Run.state.not_in(ENDED))) or 0
    if 0 < project.max_live_runs <= num_live:
        raise Conflict(
            f"project '{project.name}' has {num_live} runs on their way, and max_live_runs = {project.max_live_runs}; "
            "wait until one has ended, or cancel one",
            field="project",
        )
    if not project.budget_usd:
        return
    if not usd:
        raise Conflict(
            f"max_cost_usd = 0: project '{project.name}' has a budget, so each run must say what it may cost at most",
            field="max_cost_usd",
        )
    spent = sa.select(sa.func.coalesce(sa.func.sum(Usage.usd), 0.0)).where(Usage.run == Run.id).scalar_subquery()
    may_cost = sa.case((Run.state.in_(ENDED), spent), (Run.max_cost_usd > spent, Run.max_cost_usd), else_=spent)
    taken = session.scalar(sa.select(sa.func.sum(may_cost)).where(of_project)) or 0.0
    if taken + usd > project.budget_usd:
        raise Conflict(
            f"max_cost_usd = {usd:g}: project '{project.name}' has {max(0.0, project.budget_usd - taken):g} of its "
            f"budget of {project.budget_usd:g} USD left; ask for less, or raise the budget",
            field="max_cost_usd",
        )


def ask_to_end(session: Session, org: str, run_id: str, want: Literal["stop", "cancel"], now: int) -> None:
    """Ask a run to end. Again, or after its end, is harmless; a cancel also follows a stop, but not the reverse."""
    run = _run(session, org, run_id)
    if run.state in ENDED or run.want == "cancel" or run.want == want:
        return
    _set_run(session, run.id, run.rev, now, "want", {"want": want}, want=want, wanted_at=now)


def resume(session: Session, org: str, run_id: str, now: int, max_cost_usd: float | None = None) -> None:
    """Queue a run again that was stopped, failed or cancelled. `max_cost_usd`: what it may cost; None: as before."""
    run = _run(session, org, run_id)
    if run.state not in ENDED or run.state == "succeeded":
        raise Conflict(f"run '{run_id}' is {run.state}; only one that stopped, failed or was cancelled can be resumed")
    check_there(session, org, run.project, run.secrets)
    most_usd = run.max_cost_usd if max_cost_usd is None else max_cost_usd
    spent_usd = spent_by_run(session, [run.id]).get(run.id, 0.0)
    if not pays_for_more(most_usd - spent_usd, most_usd, run.usd_per_hour):
        raise Conflict(
            f"max_cost_usd = {most_usd:g}: run '{run_id}' has cost {spent_usd:.2f} USD, and the rest pays for too "
            "little; give more (tandem resume RUN_ID --max-cost USD)",
            field="max_cost_usd",
        )
    _check_room(session, run.project, max(0.0, most_usd - spent_usd))
    fresh = {"want": "run", "wanted_at": now, "state": "queued", "why": "", "wait_until": 0, "ended_at": 0}
    fresh |= {"retries_left": run.retries, "max_cost_usd": most_usd}
    _set_run(session, run.id, run.rev, now, "state", {"state": "queued"}, **fresh)


# --- an agent


def claim(session: Session, attempt_id: str, instance: str, now: int) -> bool:
    """Claim an attempt for one execution; return False if it was this one's already. Conflict if it is another's, or
    closed: that execution must end, having touched nothing."""
    won = _set_attempt(
        session, attempt_id, Attempt.state == "open",
        state="claimed", claimed_by=instance, claimed_at=now, lease_until=now + LEASE_MS, moved_at=now,
    )  # fmt: skip
    attempt = _attempt(session, attempt_id)
    if attempt.state == "closed" or attempt.claimed_by != instance:
        by = "was closed" if attempt.state == "closed" else "is another execution's"
        raise Conflict(f"attempt '{attempt_id}' {by}; end here, and write nothing")
    if won:
        _tell(session, attempt.run, now, "attempt", n=attempt.n, state="claimed")
    return won


def limits_of(session: Session, run: Run, attempt: Attempt, now: int) -> CostLimits | None:
    """Return what the costs of a run demand of an attempt that was claimed, from now on."""
    spent_usd = spent_by_run(session, [run.id]).get(run.id, 0.0)
    view = RunView(run.id, "running", "run", max_cost_usd=run.max_cost_usd, spent_usd=spent_usd)
    held = AttemptView(
        attempt.id, attempt.n, "", "claimed", claimed_at=attempt.claimed_at, usd_per_hour=attempt.usd_per_hour
    )
    times = cost_times(view, held)
    if times is None:
        return None
    stop_s, cancel_s, spent_s = ((at - now) / 1000 for at in (times.stop_at, times.cancel_at, times.spent_at))
    return CostLimits(stop_s=stop_s, cancel_s=cancel_s, spent_s=spent_s)


def _renewal() -> sa.Executable:
    """The statement of `renew`, made once: making it costs more than running it."""
    held, runs, given = _ATTEMPTS.c, _RUNS.c, sa.bindparam
    by_this = sa.and_(
        held.id == given("attempt"), held.state == "claimed", held.claimed_by == given("instance"), held.ended_at == 0
    )
    moved_at = sa.case((held.ticks == given("new_ticks"), held.moved_at), else_=given("now", type_=sa.BigInteger()))
    renewed = sa.update(_ATTEMPTS).where(by_this).values(
        lease_until=given("until"), limit_ms=given("limit"), moved_at=moved_at, ticks=given("new_ticks")
    )  # fmt: skip
    of_run = [
        sa.select(column).where(runs.id == held.run).correlate(_ATTEMPTS).scalar_subquery().label(column.name)
        for column in (runs.want, runs.wanted_at, runs.max_cost_usd)
    ]
    # In RETURNING, SQLAlchemy writes columns for SQLite without their table, and `run = run` sums up all runs' usage.
    of_this = _USAGE.c.run == sa.literal_column("attempts.run")
    spent = sa.select(sa.func.sum(_USAGE.c.usd)).where(of_this).correlate(_ATTEMPTS).scalar_subquery()
    return renewed.returning(held.run, held.claimed_at, held.usd_per_hour, *of_run, spent.label("spent"))


_RENEWAL = _renewal()


def renew(
    connection: sa.Connection | Session, attempt_id: str, instance: str, ticks: int, limit_ms: int, now: int
) -> Want:
    """Renew the lease by a sign of life; return what the execution should do. Fenced if it must end at once."""
    given = {
        "attempt": attempt_id, "instance": instance, "new_ticks": ticks, "limit": limit_ms, "now": now,
        "until": now + LEASE_MS,
    }  # fmt: skip
    found = connection.execute(_RENEWAL, given).one_or_none()
    if found is None:
        held = sa.select(_ATTEMPTS.c.claimed_by).where(_ATTEMPTS.c.id == attempt_id, _ATTEMPTS.c.state == "claimed")
        if connection.execute(held).scalar_one_or_none() != instance:
            raise _fenced(attempt_id)
        raise Fenced(f"attempt '{attempt_id}' has ended by its own word; write nothing more")
    view = RunView(
        found.run, "running", found.want, wanted_at=found.wanted_at, max_cost_usd=found.max_cost_usd,
        spent_usd=found.spent or 0.0,
    )  # fmt: skip
    attempt = AttemptView(attempt_id, 0, "", "claimed", claimed_at=found.claimed_at, usd_per_hour=found.usd_per_hour)
    return wanted(view, attempt, now)[0]


def check_claimed(session: Session, attempt_id: str, instance: str) -> None:
    """Fenced unless this execution holds the attempt."""
    _claimed_by(session, attempt_id, instance)


def end(session: Session, attempt_id: str, instance: str, ending: Ending, now: int) -> bool:
    """Write how the claimed execution ended; return False if it said so before: the first word counts. Fenced if the
    attempt was closed before."""
    if _claimed_by(session, attempt_id, instance).end is not None:
        return False
    return _set_attempt(session, attempt_id, Attempt.state == "claimed", end=asdict(ending), ended_at=now)


# --- the loop


SPENT_BY_RUN = sa.select(sa.func.sum(_USAGE.c.usd)).where(_USAGE.c.run == _RUNS.c.id).correlate(_RUNS).scalar_subquery()
_OF_RUN, _OF_ATTEMPT = ([each.name for each in fields(view)] for view in (RunView, AttemptView))


def _live() -> sa.Executable:
    """The statement of `live`, made once."""
    made = {"spent_usd": sa.func.coalesce(SPENT_BY_RUN, 0.0), "serves": _RUNS.c.serves.is_not(None)}
    columns: list[Any] = [made[name] if name in made else _RUNS.c[name] for name in _OF_RUN]
    columns += [_ATTEMPTS.c[name] for name in _OF_ATTEMPT]
    newest = sa.and_(_ATTEMPTS.c.run == _RUNS.c.id, _ATTEMPTS.c.n == _RUNS.c.attempt_n)
    both = sa.select(*columns).select_from(_RUNS).join(_ATTEMPTS, newest, isouter=True)
    return both.where(_RUNS.c.state.not_in(ENDED)).order_by(_RUNS.c.at)


_LIVE = _live()


def live(session: Session) -> list[tuple[RunView, AttemptView | None]]:
    """Return the runs that have not ended, each with its newest attempt."""
    rows = cast("Sequence[Sequence[Any]]", session.connection().execute(_LIVE).all())
    return [(RunView(*row[: len(_OF_RUN)]), _attempt_view(row[len(_OF_RUN) :])) for row in rows]


def _attempt_view(row: Sequence[Any]) -> AttemptView | None:
    known = dict(zip(_OF_ATTEMPT, row, strict=True))
    if known["id"] is None:  # the run has no attempt yet
        return None
    where, end = known.pop("handle"), known.pop("end")
    return AttemptView(handle=where and Handle(**where), end=end and _ending(end), **known)


def open_names(session: Session, names: Sequence[str]) -> set[str]:
    """Return which of these names belong to attempts that are not closed."""
    found = sa.select(Attempt.name).where(Attempt.name.in_(names), Attempt.state != "closed")
    return set(session.scalars(found)) if names else set()


def open_attempt(session: Session, run: RunView, n: int, prefix: str, now: int) -> None:
    """Write an attempt's row, with the name that its job will have, before the provider is asked."""
    row = session.get_one(Run, run.id)
    told = {"state": "starting", "attempt": n}
    _set_run(session, run.id, run.rev, now, "state", told, state="starting", why="", attempt_n=n)
    session.add(
        Attempt(
            id=new_id("attempt"), org=row.org, run=run.id, at=now, n=n, name=f"{prefix}{run.id}-{n}", target=row.target,
            usd_per_hour=row.usd_per_hour, handle=None, state="open", claimed_by="", claimed_at=0, lease_until=0,
            ticks=0, moved_at=0, limit_ms=0, end=None, ended_at=0, closed_at=0, closed_why="",
        )
    )  # fmt: skip
    session.flush()


def note_handle(session: Session, attempt: AttemptView, handle: Handle) -> None:
    _set_attempt(session, attempt.id, sa.and_(Attempt.state != "closed"), handle=asdict(handle))


def wait_for_room(session: Session, run: RunView, attempt: AttemptView, why: str, now: int) -> None:
    """Write why a job cannot be started yet. The time in which it must have been started begins again."""
    note_why(session, run, why)
    _set_attempt(session, attempt.id, Attempt.state == "open", at=now)


def note_why(session: Session, run: RunView, why: str) -> None:
    session.execute(sa.update(_RUNS).where(_RUNS.c.id == run.id, _RUNS.c.rev == run.rev).values(why=why))


def move(session: Session, run: RunView, state: RunState, why: str, now: int) -> None:
    more: dict[str, Any] = {"ended_at": now} if state in ENDED else {}
    _set_run(session, run.id, run.rev, now, "state", {"state": state, "why": why}, state=state, why=why, **more)


def close(
    session: Session, run: RunView, attempt: AttemptView, state: RunState, why: str, wait_ms: int, now: int
) -> None:
    """Close the attempt as it was read, count what it used, and write the run's state."""
    again = state == "waiting"
    more: dict[str, Any] = {"ended_at": now} if state in ENDED else {}
    if again:
        more = {"wait_until": now + wait_ms, "retries_left": run.retries_left - 1}
    told = {"state": state, "why": why, "attempt": attempt.n}
    _set_run(session, run.id, run.rev, now, "state", told, state=state, why=why, **more)
    as_read = sa.and_(
        Attempt.state == attempt.state,
        Attempt.lease_until == attempt.lease_until,
        (Attempt.ended_at == 0) if attempt.end is None else (Attempt.ended_at > 0),
    )
    if not _set_attempt(session, attempt.id, as_read, state="closed", closed_at=now, closed_why=why or state):
        raise Conflict(f"attempt '{attempt.id}' has changed since it was read")
    if attempt.claimed_at:
        row = _attempt(session, attempt.id)
        until = max(row.claimed_at, row.ended_at or min(now, row.lease_until))
        if not row.ended_at and (times := cost_times(run, attempt)) is not None:  # its agent kept to them, if alone
            until = row.lease_until = min(until, max(times.spent_at, row.lease_until - LEASE_MS))
        session.add(
            Usage(
                key=f"{row.id}:compute", org=row.org, run=row.run, kind="compute", began=row.claimed_at, ended=until,
                usd=attempt.cost_usd(until),
            )
        )  # fmt: skip
    session.flush()


# --- rows


def _ending(told: dict[str, Any]) -> Ending:
    return Ending(cast("EndState", told["state"]), str(told["why"]), bool(told["retriable"]))


def spent_by_run(session: Session, runs: Sequence[str]) -> dict[str, float]:
    if not runs:
        return {}
    sums = sa.select(Usage.run, sa.func.sum(Usage.usd)).where(Usage.run.in_(runs)).group_by(Usage.run)
    return {run: float(usd) for run, usd in session.execute(sums)}


def _run(session: Session, org: str, run_id: str) -> Run:
    run = session.scalar(sa.select(Run).where(Run.id == run_id, Run.org == org))
    if run is None:
        raise NotKnown(f"there is no run '{run_id}'", field="run")
    return run


def _attempt(session: Session, attempt_id: str) -> Attempt:
    found = sa.select(Attempt).where(Attempt.id == attempt_id).execution_options(populate_existing=True)
    if (attempt := session.scalar(found)) is None:
        raise NotKnown(f"there is no attempt '{attempt_id}'", field="attempt")
    return attempt


def _claimed_by(session: Session, attempt_id: str, instance: str) -> Attempt:
    attempt = _attempt(session, attempt_id)
    if attempt.state != "claimed" or attempt.claimed_by != instance:
        raise _fenced(attempt_id)
    return attempt


def _fenced(attempt_id: str) -> Fenced:
    return Fenced(f"attempt '{attempt_id}' was closed or is another execution's; end here, and write nothing more")


def _set_run(session: Session, run_id: str, rev: int, now: int, kind: str, body: dict[str, Any], **values: Any) -> None:
    """Change a run as it was read, and write the event that tells of it."""
    as_read = sa.update(_RUNS).where(_RUNS.c.id == run_id, _RUNS.c.rev == rev)
    changed = as_read.values(rev=rev + 1, event_n=_RUNS.c.event_n + 1, **values)
    found = session.execute(changed.returning(_RUNS.c.event_n, _RUNS.c.org)).one_or_none()
    if found is None:
        raise Conflict(f"run '{run_id}' has changed since it was read; send it again")
    session.execute(sa.insert(_EVENTS), {"run": run_id, "n": found[0], "org": found[1], "at": now, "kind": kind,
                                         "body": body})  # fmt: skip


def _set_attempt(session: Session, attempt_id: str, where: sa.ColumnElement[bool], **values: Any) -> bool:
    found = session.execute(sa.update(Attempt).where(Attempt.id == attempt_id, where).values(**values))
    return cast("sa.CursorResult[Any]", found).rowcount == 1


def _tell(session: Session, run_id: str, now: int, kind: str, **body: Any) -> None:
    number = sa.update(Run).where(Run.id == run_id).values(event_n=Run.event_n + 1).returning(Run.event_n, Run.org)
    n, org = session.execute(number).one()
    session.add(Event(run=run_id, n=n, org=org, at=now, kind=kind, body=body))
    session.flush()
