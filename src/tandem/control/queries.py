"""What callers may see. Every question names the caller's org and, if the caller has one, its project."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tandem.control import transitions
from tandem.control.callers import Caller
from tandem.control.decide import ENDED, AttemptView
from tandem.control.ids import new_id
from tandem.control.tables import Attempt, Event, Key, Org, Project, Run, Secret, Usage
from tandem.errors import NotKnown
from tandem.shapes.runs import (
    RUN_ID,
    AttemptInfo,
    EventInfo,
    KeyInfo,
    Me,
    OrgInfo,
    ProjectInfo,
    RunInfo,
    SecretInfo,
    UsageInfo,
)

DEFAULT = "default"
_RUNS, _ATTEMPTS = (cast("sa.Table", each.__table__) for each in (Run, Attempt))


def visible_run(session: Session, caller: Caller, run_id: str) -> Run:
    """Return a run that the caller may see. NotKnown otherwise, also if it is another's."""
    asked = sa.select(Run).where(Run.id == run_id, *_seen_by(caller))
    run = session.scalar(asked) if RUN_ID.fullmatch(run_id) else None
    if run is None:
        raise _no_run(run_id)
    return run


def _no_run(run_id: str) -> NotKnown:
    return NotKnown(f"there is no run '{run_id:.40}'", field="run")


def _seen_by(caller: Caller) -> list[sa.ColumnElement[bool]]:
    return [Run.org == caller.org, Run.serves.is_(None), *([Run.project == caller.project] if caller.project else [])]


def _shown() -> sa.Select[*tuple[Any, ...]]:
    """What RunInfo has of a run, made once: making a statement costs more than running it."""
    runs, newest = _RUNS.c, _ATTEMPTS.c
    project = sa.select(Project.name).where(Project.id == runs.project).correlate(_RUNS).scalar_subquery()
    under_way = [
        sa.case((newest.state == "claimed", column), else_=0).label(f"newest_{column.name}")
        for column in (newest.claimed_at, newest.ended_at, newest.usd_per_hour)
    ]
    shown = sa.select(
        runs.id, runs.name, sa.func.coalesce(project, "").label("project"), runs.group, runs.target, runs.state,
        runs.want, runs.why, runs.at, runs.ended_at, runs.attempt_n.label("attempt"), runs.max_cost_usd, runs.secrets,
        sa.func.coalesce(transitions.SPENT_BY_RUN, 0.0).label("cost_usd"), *under_way,
    )  # fmt: skip
    its_newest = sa.and_(newest.run == runs.id, newest.n == runs.attempt_n)
    return shown.select_from(_RUNS).join(_ATTEMPTS, its_newest, isouter=True).where(runs.serves.is_(None))


_SHOWN = _shown()
_FIELDS = [column.name for column in _SHOWN.selected_columns][:-4]
_ONE = _SHOWN.where(
    _RUNS.c.id == sa.bindparam("run"),
    _RUNS.c.org == sa.bindparam("org"),
    sa.or_(sa.bindparam("only", type_=sa.String()) == "", _RUNS.c.project == sa.bindparam("only")),
)


def run_info(session: Session, caller: Caller, run_id: str, now: int) -> RunInfo:
    """Return what a caller may see of a run."""
    given = {"run": run_id if RUN_ID.fullmatch(run_id) else "", "org": caller.org, "only": caller.project}
    row = cast("Sequence[Any] | None", session.connection().execute(_ONE, given).one_or_none())
    if row is None:
        raise _no_run(run_id)
    return _info(row, now)


def run_page(
    session: Session, caller: Caller, filters: Mapping[str, str], before: str, limit: int, now: int
) -> list[RunInfo]:
    """Return runs, the newest first. `filters`: state, project, group, where they are not empty."""
    asked = _SHOWN.where(*_seen_by(caller))
    if state := filters.get("state"):
        asked = asked.where(Run.state == state)
    if group := filters.get("group"):
        asked = asked.where(Run.group == group)
    if project := filters.get("project"):
        named = sa.select(Project.id).where(Project.org == caller.org, Project.name == project)
        asked = asked.where(Run.project.in_(named))
    if before:
        mark = visible_run(session, caller, before)
        asked = asked.where(sa.tuple_(Run.at, Run.id) < sa.tuple_(sa.literal(mark.at), sa.literal(mark.id)))
    found = session.connection().execute(asked.order_by(Run.at.desc(), Run.id.desc()).limit(limit)).all()
    return [_info(row, now) for row in cast("Sequence[Sequence[Any]]", found)]


def _info(row: Sequence[Any], now: int) -> RunInfo:
    cost_usd, claimed_at, ended_at, usd_per_hour = row[-4:]
    attempt = AttemptView("", 0, "", "claimed", claimed_at=claimed_at or 0, usd_per_hour=usd_per_hour or 0.0)
    shown = dict(zip(_FIELDS, row, strict=False))
    return RunInfo(**shown, cost_usd=cost_usd + attempt.cost_usd(ended_at or now))


def with_progress(info: RunInfo, status: bytes, progress: bytes) -> RunInfo:
    """Return the run with what its mirrored status.json and progress.json say; damaged files say nothing."""
    told, sign = _table(status), _table(progress)
    return info.model_copy(
        update={
            "stage": str(sign.get("stage") or ""),
            "step": _whole(sign.get("step") if sign else told.get("steps_done")),
            "steps_total": _whole(told.get("steps_total")),
            "verdict": str(told.get("verdict") or ""),
            "error": str(told.get("error") or ""),
        }
    )


def _table(content: bytes) -> Mapping[str, Any]:
    try:
        found: object = json.loads(content) if content else {}
    except ValueError:
        return {}
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def _whole(value: object) -> int:
    return int(value) if isinstance(value, int | float) and abs(value) < 2**53 else 0


def events(session: Session, caller: Caller, run_id: str, after: int, limit: int) -> tuple[list[EventInfo], bool]:
    """Return events after a number, and whether the run has ended and has no more."""
    run = visible_run(session, caller, run_id)
    asked = sa.select(Event).where(Event.run == run_id, Event.n > after).order_by(Event.n).limit(limit)
    found = [EventInfo(n=each.n, at=each.at, kind=each.kind, body=each.body) for each in session.scalars(asked)]
    last = found[-1].n if found else after
    return found, run.state in ENDED and last >= run.event_n


def attempts(session: Session, caller: Caller, run_id: str) -> list[AttemptInfo]:
    visible_run(session, caller, run_id)
    return [
        AttemptInfo(
            n=each.n, state=each.state, target=each.target, at=each.at, claimed_at=each.claimed_at,
            ended_at=each.ended_at, closed_at=each.closed_at, why=each.closed_why,
        )
        for each in session.scalars(sa.select(Attempt).where(Attempt.run == run_id).order_by(Attempt.n))
    ]  # fmt: skip


def usage_page(
    session: Session, caller: Caller, after: str, limit: int, since: int = 0, until: int = 0
) -> list[UsageInfo]:
    """Return what attempts used, in the order of their keys, so that an export can go on where it was. `since`,
    `until`: only of attempts that ended from the one time on and before the other; 0: no limit."""
    asked = sa.select(Usage, Run.name, Project.name).join(Run, Run.id == Usage.run)
    asked = asked.join(Project, Project.id == Run.project, isouter=True)
    asked = asked.where(*_seen_by(caller), Usage.key > after, Usage.ended >= since)
    if until:
        asked = asked.where(Usage.ended < until)
    found = session.execute(asked.order_by(Usage.key).limit(limit))
    return [
        UsageInfo(
            key=each.key, run=each.run, run_name=name, project=project or "", kind=each.kind, began=each.began,
            ended=each.ended, usd=each.usd,
        )
        for each, name, project in found
    ]  # fmt: skip


# --- orgs, projects and keys


def make_org(session: Session, name: str, now: int) -> OrgInfo:
    """Return the org of this name, with its first project; make them if there are none."""
    org = transitions.make_org(session, name, now)
    session.flush()
    put_project(session, org, DEFAULT, None, None, now)
    return OrgInfo(id=org, name=name)


def project_of(session: Session, caller: Caller, name: str) -> str:
    """Return the id of a project that the caller may use, by its name."""
    found = session.scalar(sa.select(Project.id).where(Project.org == caller.org, Project.name == name))
    if found is None or (caller.project and caller.project != found):
        raise NotKnown(f"project = '{name}': there is none of this name", field="project")
    return found


def put_project(
    session: Session, org: str, name: str, budget_usd: float | None, max_live_runs: int | None, now: int
) -> str:
    """Make a project, or change what is not None of the one of this name; return its id."""
    row = session.scalar(sa.select(Project).where(Project.org == org, Project.name == name))
    if row is None:
        row = Project(id=new_id("project"), org=org, at=now, name=name, budget_usd=0.0, max_live_runs=0)
        session.add(row)
    if budget_usd is not None:
        row.budget_usd = budget_usd
    if max_live_runs is not None:
        row.max_live_runs = max_live_runs
    session.flush()
    return row.id


def projects(session: Session, caller: Caller) -> list[ProjectInfo]:
    seen = sa.select(Project).where(Project.org == caller.org)
    if caller.project:
        seen = seen.where(Project.id == caller.project)
    sums = sa.select(Run.project, sa.func.sum(Usage.usd)).join(Run, Run.id == Usage.run).where(*_seen_by(caller))
    spent: dict[str, float] = dict(session.execute(sums.group_by(Run.project)).all())
    return [
        ProjectInfo(
            id=each.id, name=each.name, budget_usd=each.budget_usd, max_live_runs=each.max_live_runs,
            spent_usd=float(spent.get(each.id) or 0.0),
        )
        for each in session.scalars(seen.order_by(Project.name))
    ]  # fmt: skip


def keys(session: Session, caller: Caller) -> list[KeyInfo]:
    """Return the keys of the caller's org; of its project alone if it has one."""
    seen = sa.select(Key).where(Key.org == caller.org)
    if caller.project:
        seen = seen.where(Key.project == caller.project)
    return [key_info(session, each) for each in session.scalars(seen.order_by(Key.at, Key.id))]


def key_info(session: Session, row: Key, key: str = "") -> KeyInfo:
    project = session.get(Project, row.project) if row.project else None
    return KeyInfo(
        id=row.id, name=row.name, scopes=cast("Any", row.scopes), project="" if project is None else project.name,
        at=row.at, expires_at=row.expires_at, revoked_at=row.revoked_at, key=key,
    )  # fmt: skip


def secret_info(session: Session, row: Secret) -> SecretInfo:
    project = session.get(Project, row.project) if row.project else None
    return SecretInfo(
        id=row.id, name=row.name, project="" if project is None else project.name, at=row.at,
        changed_by=row.changed_by, version=row.version,
    )  # fmt: skip


def me(session: Session, caller: Caller) -> Me:
    project = session.get(Project, caller.project) if caller.project else None
    return Me(
        key=caller.key, org=caller.org, org_name=session.get_one(Org, caller.org).name,
        project="" if project is None else project.name, scopes=cast("Any", sorted(caller.scopes)),
        operator=caller.is_operator,
    )  # fmt: skip
