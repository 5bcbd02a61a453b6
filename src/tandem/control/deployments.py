"""Deployments in the database: a name, its revisions, their weights. Every question names the caller's org."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tandem.control import counts, transitions
from tandem.control.callers import Caller
from tandem.control.counts import Counts
from tandem.control.decide import ENDED
from tandem.control.ids import new_id
from tandem.control.queries import DEFAULT, project_of, visible_run
from tandem.control.replicas import Replicas
from tandem.control.tables import Attempt, Deployment, Rating, Revision, Run
from tandem.errors import Conflict, NotKnown
from tandem.shapes.agent import weights_of
from tandem.shapes.deployments import DeployBody, DeploymentInfo, Measured, RevisionInfo

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
    _refuse_online(row)
    others = _revisions(session, row.id)
    if body.canary and not any(each.weight for each in others):
        raise Conflict(
            f"canary = {body.canary:g}: '{body.name}' has no revision with a weight beside it", field="canary"
        )
    if body.canary and (tried := next((each.n for each in others if each.canary), 0)):
        raise Conflict(
            f"canary = {body.canary:g}: {body.name}@{tried} is tried already; promote it, or roll back", field="canary"
        )
    n = max((each.n for each in others), default=0) + 1
    if body.engine == "vllm" and tomllib.loads(run.spec_toml).get("engine", {}).get("kind") != "vllm":
        raise Conflict(
            f"engine = 'vllm': run '{run.id}' did not sample with vLLM, so its spec names none; use 'hf'",
            field="engine",
        )
    base = base_of(run.spec_toml)
    serves = {"run": run.id, "step": body.step, "feedback": body.feedback, "engine": body.engine, "base": base}
    asked = transitions.Submitted(
        caller.org, f"{body.name}@{n}", run.spec_toml, run.target, project=run.project, created_by=caller.key,
        usd_per_hour=usd_per_hour, retries=_RESTARTS, serves=serves,
    )  # fmt: skip
    shared = _over_the_same_base(session, run, serves)
    session.add(
        Revision(
            deployment=row.id, n=n, org=caller.org, at=now, run=run.id, step=body.step,
            replica=shared or transitions.submit(session, asked, now), weight=body.weight or (WHOLE if n == 1 else 0),
            canary=body.canary, keep_s=body.keep_s, why="", counts={}, beside={},
        )
    )  # fmt: skip
    session.flush()
    return row.id


def deploy_online(session: Session, caller: Caller, body: DeployBody, now: int) -> str:
    """Put an online server behind a new name; return the deployment's id."""
    taken = sa.select(sa.func.count()).where(Deployment.org == caller.org, Deployment.name == body.name)
    if session.scalar(taken):
        raise Conflict(f"name = '{body.name}': is taken; an online server has a name of its own", field="name")
    row = Deployment(
        id=new_id("deployment"), org=caller.org, project=project_of(session, caller, DEFAULT), name=body.name, at=now,
        before={}, online=body.online,
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row.id


def _refuse_online(row: Deployment) -> None:
    if row.online:
        raise Conflict(f"'{row.name}' is the online server '{row.online}', which makes and promotes its own versions")


def base_of(spec_toml: str) -> str:
    """Return a text that is the same for runs that train adapters over the same base: the same [model], but for what is
    trained. Empty for a run whose base is not served under adapters."""
    spec = tomllib.loads(spec_toml)
    model = {**spec.get("model", {})}
    lora = model.pop("lora", None)
    if lora is None or lora.get("base", "exact") != "exact":
        return ""
    seed = spec.get("seed", 0) if "preset" in model else 0
    return hashlib.sha256(json.dumps([model, seed], sort_keys=True).encode()).hexdigest()[:24]


def _over_the_same_base(session: Session, run: Run, wanted: Mapping[str, object]) -> str:
    """Return the run of a replica that can serve an adapter over this base, too; empty if there is none."""
    asked = sa.select(Run).where(
        Run.org == run.org, Run.project == run.project, Run.target == run.target, Run.serves.is_not(None),
        Run.state.not_in(ENDED), Run.want == "run", Run.id.in_(sa.select(Revision.replica)),
    )  # fmt: skip
    for each in session.scalars(asked.order_by(Run.at)) if wanted["base"] else ():
        serves = {"feedback": False, "engine": "hf", **(each.serves or {})}
        if all(serves.get(what) == wanted[what] for what in ("base", "feedback", "engine")):
            return each.id
    return ""


def of_replica(session: Session, replica: str) -> list[tuple[str, str, int]]:
    """Return name, run and step of the revisions that a replica serves."""
    asked = sa.select(Deployment.name, Revision.n, Revision.run, Revision.step).where(
        Revision.replica == replica, Revision.deployment == Deployment.id
    )
    found = cast("list[tuple[str, int, str, int]]", session.execute(asked.order_by(Deployment.name, Revision.n)).all())
    return [(f"{name}@{n}", run, step) for name, n, run, step in found]


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
    items, rated = list[RevisionInfo](), _rated(session, row.id)
    for each in _revisions(session, row.id):
        run = session.get_one(Run, each.replica)
        seen, model = Counts(**each.counts), _weights(row.name, each)
        ready = replicas.find(each.replica, now, model) is not None
        fine = seen.requests - seen.errors
        low, high = counts.wilson(seen.errors, seen.requests)
        errors = Measured(
            count=int(seen.requests), mean=seen.errors / max(1, seen.requests), low=low, high=high
        )  # fmt: skip
        items.append(
            RevisionInfo(
                n=each.n, run=each.run, step=each.step, weight=each.weight, state=run.state,
                why=run.why or each.why or replicas.why_not(each.replica, model) or _why_again(session, run, ready),
                ready=ready, at=each.at, asleep=_is_asleep(each, run),
                canary=each.canary, keep_s=each.keep_s, errors=errors,
                seconds=_measured(fine, seen.seconds, seen.squares),
                feedback=_measured(*rated.get(each.n, (0, 0.0, 0.0))),
            )
        )  # fmt: skip
    return DeploymentInfo(id=row.id, name=row.name, at=row.at, revisions=items, online=row.online)


def _measured(count: float, total: float, squares: float) -> Measured:
    middle, reach = counts.mean(total, squares, count)
    reach = min(reach, 1e300)  # JSON has no infinity
    return Measured(count=int(count), mean=middle, low=middle - reach, high=middle + reach)


def _rated(session: Session, deployment: str) -> dict[int, tuple[int, float, float]]:
    """Return count, sum and sum of squares of the ratings of each revision."""
    sums = sa.func.count(), sa.func.sum(Rating.value), sa.func.sum(Rating.value * Rating.value)
    asked = sa.select(Rating.n, *sums).where(Rating.deployment == deployment).group_by(Rating.n)
    return {n: (count, total, squares) for n, count, total, squares in session.execute(asked)}


def _why_again(session: Session, run: Run, ready: bool) -> str:
    """Return why a replica that does not answer yet was started again; empty at its first start."""
    if ready or run.attempt_n < 2:
        return ""
    before = sa.select(Attempt.closed_why).where(Attempt.run == run.id, Attempt.n == run.attempt_n - 1)
    return f"start {run.attempt_n}; before: {session.scalar(before)}"


def _is_asleep(revision: Revision, run: Run) -> bool:
    return bool(revision.keep_s) and run.state == "stopped"


def promote(session: Session, row: Deployment, n: int, replicas: Replicas, now: int) -> None:
    """Give all requests to one revision. Conflict unless its replica answers or is asleep: its weights were proven."""
    _refuse_online(row)
    revisions = {each.n: each for each in _revisions(session, row.id)}
    if n not in revisions:
        raise NotKnown(f"'{row.name}' has no revision {n}", field="revision")
    _set_weights(session, row, {n: WHOLE}, replicas, now)


def rollback(session: Session, row: Deployment, replicas: Replicas, now: int) -> None:
    """Take the canary away, if one is tried; otherwise give the requests back to the revisions that had them before the
    last promote."""
    _refuse_online(row)
    if tried := [each for each in _revisions(session, row.id) if each.canary]:
        tried[0].canary = 0.0
        session.flush()
        return
    if not row.before:
        raise Conflict(f"'{row.name}' was not promoted yet, so there is nothing to go back to")
    _set_weights(session, row, {int(n): weight for n, weight in row.before.items()}, replicas, now)


def _set_weights(session: Session, row: Deployment, weights: dict[int, int], replicas: Replicas, now: int) -> None:
    revisions = _revisions(session, row.id)
    for each in revisions:
        run = session.get_one(Run, each.replica)
        model = _weights(row.name, each)
        if weights.get(each.n) and replicas.find(each.replica, now, model) is None and not _is_asleep(each, run):
            why = run.why or replicas.why_not(each.replica, model)
            raise Conflict(f"{row.name}@{each.n} does not answer yet{f': {why}' if why else ''}", field="revision")
    before = {str(each.n): each.weight for each in revisions if each.weight}
    for each in revisions:
        each.weight, each.canary = weights.get(each.n, 0), 0.0
    row.before = before
    session.flush()


def undeploy(session: Session, row: Deployment, now: int) -> None:
    """Take the name away. Its replicas are asked to end, and answer what they have begun. One that also serves other
    names goes on."""
    revisions = _revisions(session, row.id)
    for each in revisions:
        session.delete(each)
    session.flush()
    for replica, org in {each.replica: each.org for each in revisions}.items():
        if session.scalar(sa.select(sa.func.count()).where(Revision.replica == replica)) == 0:
            transitions.ask_to_end(session, org, replica, "stop", now)
    session.execute(sa.delete(Rating).where(Rating.deployment == row.id))
    session.flush()
    session.delete(row)
    session.flush()


def _weights(name: str, revision: Revision) -> str:
    return weights_of(f"{name}@{revision.n}", revision.run, revision.step)


def _revisions(session: Session, deployment: str) -> list[Revision]:
    return list(session.scalars(sa.select(Revision).where(Revision.deployment == deployment).order_by(Revision.n)))


# --- requests


@dataclass(frozen=True, slots=True)
class Candidate:
    """A revision that may answer a request."""

    deployment: str
    n: int
    replica: str
    weight: int = 1
    canary: float = 0.0
    asleep: bool = False
    online: str = ""
    """The online server that answers in place of a revision."""
    weights: str = ""
    """The model that its replica must have, by `weights_of`."""
    ended: bool = False
    """Its replica has ended and is not started again."""


def candidates(session: Session, caller: Caller, name: str) -> list[Candidate]:
    """Return the revisions that may answer for `NAME` or `NAME@N`."""
    plain, _, pinned = name.partition("@")
    row = find(session, caller, plain)
    if row.online:
        if pinned:
            raise NotKnown(f"'{plain}' is an online server and has no revisions; ask '{plain}'", field="model")
        return [Candidate(row.id, 0, "", online=row.online)]
    of = Revision.deployment == row.id
    rows = session.execute(
        sa.select(Revision, Run).join(Run, Run.id == Revision.replica).where(of).order_by(Revision.n)
    )
    found = [
        Candidate(
            each.deployment,
            each.n,
            each.replica,
            each.weight,
            each.canary,
            _is_asleep(each, run),
            weights=_weights(plain, each),
            ended=run.state in ENDED,
        )
        for each, run in cast("list[tuple[Revision, Run]]", rows.all())
    ]
    if not pinned:
        return [each for each in found if each.weight or each.canary]
    found = [replace(each, weight=1, canary=0.0) for each in found if str(each.n) == pinned]
    if not found:
        raise NotKnown(f"there is no revision '{name:.80}'", field="model")
    return found


def wake(session: Session, choice: Candidate, now: int) -> None:
    """Start the replica of a revision that is asleep. Again is harmless."""
    run = session.get(Run, choice.replica)
    if run is not None and run.state == "stopped":
        transitions.resume(session, run.org, run.id, now)


def rate(session: Session, choice: Candidate, answer: str, value: float, now: int) -> None:
    """Write what a user thought of an answer."""
    row = session.get(Deployment, choice.deployment)
    if row is not None:
        session.merge(Rating(deployment=row.id, answer=answer, org=row.org, at=now, n=choice.n, value=value))
        session.flush()


# --- once a second


def idle(session: Session, idle_ms: Callable[[str], int | None]) -> list[tuple[str, str]]:
    """Return org and id of the runs whose replicas no request has reached for too long. `idle_ms`: of a run's replica;
    None where none answers."""
    shortest, longest = sa.func.min(Revision.keep_s), sa.func.max(Revision.keep_s)
    asked = sa.select(Revision.org, Revision.replica, longest).group_by(Revision.org, Revision.replica)
    asked = asked.having(shortest > 0)
    return [
        (org, run)
        for org, run, keep_s in cast("list[tuple[str, str, int]]", session.execute(asked).all())
        if (since := idle_ms(run)) is not None and since > keep_s * 1000
    ]


def count(session: Session, told: Mapping[tuple[str, int], Counts]) -> list[tuple[Deployment, Revision]]:
    """Add what revisions answered; roll back the canaries that fail more often than the others, and return them."""
    rolled_back = list[tuple[Deployment, Revision]]()
    for deployment in {deployment for deployment, _ in told}:
        revisions = _revisions(session, deployment)
        for each in revisions:
            each.counts = told.get((deployment, each.n), Counts()).plus(each.counts)
        for tried in (each for each in revisions if each.canary):
            for each in revisions:
                if each.weight:
                    tried.beside = told.get((deployment, each.n), Counts()).plus(tried.beside)
            if why := counts.why_worse(Counts(**tried.counts), Counts(**tried.beside)):
                tried.canary, tried.why = 0.0, f"rolled back: {why}"
                rolled_back.append((session.get_one(Deployment, deployment), tried))
    session.flush()
    return rolled_back
