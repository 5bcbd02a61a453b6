"""Deployments in the database: a name, its revisions, their weights. Every question names the caller's org."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tandem.control import transitions
from tandem.control.callers import Caller
from tandem.control.ids import new_id
from tandem.control.queries import visible_run
from tandem.control.replicas import Replicas
from tandem.control.tables import Deployment, Revision, Run
from tandem.errors import Conflict, NotKnown
from tandem.shapes.deployments import DeployBody, DeploymentInfo, RevisionInfo

WHOLE = 100
_RESTARTS = 100


def deploy(session: Session, caller: Caller, body: DeployBody, usd_per_hour: float, now: int) -> str:
    """Add a revision to a name, made if it is new, and queue the run that serves it; return the deployment's id."""
    run = visible_run(session, caller, body.run)
    row = session.scalar(sa.select(Deployment).where(Deployment.org == caller.org, Deployment.name == body.name))
    if row is None:
        row = Deployment(
            id=new_id("deployment"), org=caller.org, project=run.project, name=body.name, at=now, before={}
        )  # fmt: skip
        session.add(row)
        session.flush()
    elif caller.project and row.project != caller.project:
        raise Conflict(f"name = '{body.name}': is taken in another project", field="name")
    n = max((each.n for each in _revisions(session, row.id)), default=0) + 1
    asked = transitions.Submitted(
        caller.org, f"{body.name}@{n}", run.spec_toml, run.target, project=run.project, created_by=caller.key,
        usd_per_hour=usd_per_hour, retries=_RESTARTS, serves={"run": run.id, "step": body.step},
    )  # fmt: skip
    session.add(
        Revision(
            deployment=row.id, n=n, org=caller.org, at=now, run=run.id, step=body.step,
            replica=transitions.submit(session, asked, now), weight=body.weight or (WHOLE if n == 1 else 0),
        )
    )  # fmt: skip
    session.flush()
    return row.id


def find(session: Session, caller: Caller, name: str) -> Deployment:
    """Return a deployment by its name. NotKnown otherwise, also if it is another's."""
    asked = sa.select(Deployment).where(Deployment.org == caller.org, Deployment.name == name, *_seen_by(caller))
    row = session.scalar(asked) if name.isprintable() else None
    if row is None:
        raise NotKnown(f"there is no deployment '{name:.60}'", field="model")
    return row


def _seen_by(caller: Caller) -> list[sa.ColumnElement[bool]]:
    return [Deployment.project == caller.project] if caller.project else []


def listed(session: Session, caller: Caller) -> list[Deployment]:
    asked = sa.select(Deployment).where(Deployment.org == caller.org, *_seen_by(caller))
    return list(session.scalars(asked.order_by(Deployment.name)))


def info(session: Session, row: Deployment, replicas: Replicas, now: int) -> DeploymentInfo:
    items = list[RevisionInfo]()
    for each in _revisions(session, row.id):
        run = session.get_one(Run, each.replica)
        items.append(
            RevisionInfo(
                n=each.n, run=each.run, step=each.step, weight=each.weight, state=run.state, why=run.why,
                ready=replicas.find(each.replica, now) is not None, at=each.at,
            )
        )  # fmt: skip
    return DeploymentInfo(id=row.id, name=row.name, at=row.at, revisions=items)


def promote(session: Session, row: Deployment, n: int, replicas: Replicas, now: int) -> None:
    """Give all requests to one revision. Conflict unless its replica answers: its weights are proven then."""
    revisions = {each.n: each for each in _revisions(session, row.id)}
    if n not in revisions:
        raise NotKnown(f"'{row.name}' has no revision {n}", field="revision")
    _set_weights(session, row, {n: WHOLE}, replicas, now)


def rollback(session: Session, row: Deployment, replicas: Replicas, now: int) -> None:
    """Give the requests back to the revisions that had them before the last promote."""
    if not row.before:
        raise Conflict(f"'{row.name}' was not promoted yet, so there is nothing to go back to")
    _set_weights(session, row, {int(n): weight for n, weight in row.before.items()}, replicas, now)


def _set_weights(session: Session, row: Deployment, weights: dict[int, int], replicas: Replicas, now: int) -> None:
    revisions = _revisions(session, row.id)
    for each in revisions:
        if weights.get(each.n) and replicas.find(each.replica, now) is None:
            why = session.get_one(Run, each.replica).why
            raise Conflict(f"{row.name}@{each.n} does not answer yet{f': {why}' if why else ''}", field="revision")
    before = {str(each.n): each.weight for each in revisions if each.weight}
    for each in revisions:
        each.weight = weights.get(each.n, 0)
    row.before = before
    session.flush()


def undeploy(session: Session, row: Deployment, now: int) -> None:
    """Take the name away. Its replicas are asked to end, and answer what they have begun."""
    for each in _revisions(session, row.id):
        transitions.ask_to_end(session, each.org, each.replica, "stop", now)
        session.delete(each)
    session.flush()
    session.delete(row)
    session.flush()


def _revisions(session: Session, deployment: str) -> list[Revision]:
    return list(session.scalars(sa.select(Revision).where(Revision.deployment == deployment).order_by(Revision.n)))


def choices(session: Session, caller: Caller, name: str) -> list[tuple[int, int, str]]:
    """Return number, weight and replica of the revisions that may answer for `NAME` or `NAME@N`."""
    plain, _, pinned = name.partition("@")
    revisions = _revisions(session, find(session, caller, plain).id)
    if pinned:
        found = [(each.n, 1, each.replica) for each in revisions if str(each.n) == pinned]
        if not found:
            raise NotKnown(f"there is no revision '{name:.80}'", field="model")
        return found
    return [(each.n, each.weight, each.replica) for each in revisions if each.weight]
