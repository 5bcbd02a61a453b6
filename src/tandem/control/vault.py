"""The secrets of orgs and projects. A run names those that it needs; they are opened when its attempt is claimed.

A secret of a project is for the project's runs, and comes before the org's secret of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tandem.control.decide import ENDED
from tandem.control.ids import new_id
from tandem.control.sealing import MasterKeys, Sealed
from tandem.control.tables import Run, Secret
from tandem.errors import Conflict, NotKnown, SpecError, StoreError


def put_secret(
    session: Session, keys: MasterKeys, org: str, project: str, name: str, value: str, by: str, now: int
) -> Secret:
    """Make a secret, or replace its value. `project`: its id; empty: for the whole org."""
    sealed = keys.seal(value, _owner(org, project, name))
    row = session.scalar(sa.select(Secret).where(Secret.org == org, Secret.project == project, Secret.name == name))
    if row is None:
        row = Secret(id=new_id("secret"), org=org, project=project, name=name, version=0)
        session.add(row)
    row.at, row.changed_by, row.version = now, by, row.version + 1
    _put(row, sealed)
    session.flush()
    return row


def secrets_seen(session: Session, org: str, project: str) -> list[Secret]:
    """Return the secrets of an org; of one project alone if it is named."""
    asked = sa.select(Secret).where(Secret.org == org, *([Secret.project == project] if project else []))
    return list(session.scalars(asked.order_by(Secret.name, Secret.project)))


def delete_secret(session: Session, org: str, project: str, secret_id: str) -> Secret:
    """Delete a secret. Conflict while a run that may still need it is on its way."""
    row = session.scalar(sa.select(Secret).where(Secret.id == secret_id, Secret.org == org))
    if row is None or (project and row.project != project):
        raise NotKnown(f"there is no secret '{secret_id:.40}'", field="secret")
    live = sa.select(Run).where(Run.org == org, Run.state.not_in(ENDED))
    if row.project:
        live = live.where(Run.project == row.project)
    if needing := [run.id for run in session.scalars(live) if row.name in run.secrets]:
        raise Conflict(f"{len(needing)} runs on their way need secret '{row.name}'; cancel {needing[0]} first")
    session.delete(row)
    session.flush()
    return row


def check_there(session: Session, org: str, project: str, names: Iterable[str]) -> None:
    """Conflict if a run of this project could not get one of these secrets."""
    found = {row.name for row in _for_runs(session, org, project)}
    if missing := sorted(set(names) - found):
        raise Conflict(
            f"secrets: there is no '{missing[0]}'; `tandem control secret set {missing[0]}`", field="secrets"
        )


def secrets_of(session: Session, keys: MasterKeys, run: Run) -> dict[str, str]:
    """Open the secrets that a run names."""
    check_there(session, run.org, run.project, run.secrets)
    named = [row for row in _for_runs(session, run.org, run.project) if row.name in run.secrets]
    try:
        return {row.name: keys.open(sealed_of(row), owner_of(row)) for row in named}
    except StoreError as error:  # it stays as it is, so that asking again is no use
        raise Conflict(str(error)) from error


def wrap_all_again(session: Session, keys: MasterKeys) -> int:
    """Seal every secret's key with the first master key; return how many were not. SpecError if a key is missing."""
    if unknown := sorted(missing_keys(session, keys)):
        raise SpecError(
            f"the database has secrets that are sealed with the master key {unknown[0]}; start with the file that has "
            "its line (--secrets-key-file)"
        )
    others = list(session.scalars(sa.select(Secret).where(Secret.master != keys.first)))
    for row in others:
        _put(row, keys.wrap_again(sealed_of(row), owner_of(row)))
    return len(others)


def missing_keys(session: Session, keys: MasterKeys) -> set[str]:
    """Return the ids of master keys that seal secrets and are not there."""
    return {master for master in session.scalars(sa.select(Secret.master).distinct()) if master not in keys}


def _for_runs(session: Session, org: str, project: str) -> Sequence[Secret]:
    """Return the secrets for runs of a project; its own come last, so that they replace the org's."""
    asked = sa.select(Secret).where(Secret.org == org, Secret.project.in_(["", project]))
    return session.scalars(asked.order_by(Secret.project)).all()


def _owner(org: str, project: str, name: str) -> str:
    return f"{org}\n{project}\n{name}"


def owner_of(row: Secret) -> str:
    return _owner(row.org, row.project, row.name)


def sealed_of(row: Secret) -> Sealed:
    return Sealed(row.master, row.wrapped, row.content)


def _put(row: Secret, sealed: Sealed) -> None:
    row.master, row.wrapped, row.content = sealed.master, sealed.wrapped, sealed.content
