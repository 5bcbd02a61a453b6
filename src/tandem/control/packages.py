"""Packages of environments: who owns which name, versions that never change, and the files of the wheels.

A name begins with its org's name, and belongs to the first org that pushed it. A name that looks like another, or like
an environment of Tandem's own, is refused. So a slip of the finger gets no other org's package, and no name of an org
can be had from elsewhere.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import sqlalchemy as sa
import tomli_w
from sqlalchemy.orm import Session

from tandem.control import queries
from tandem.control.callers import Caller
from tandem.control.tables import Attempt, Org, Package, PackageVersion, Project, Run
from tandem.env.load import ADAPTERS, BUILT_IN
from tandem.errors import Conflict, Fenced, NotKnown, SpecError, StoreError
from tandem.io import atomic_write
from tandem.io.provenance import Signer
from tandem.io.wheel_file import WheelContent
from tandem.shapes.packages import PackageInfo, PackageVersionInfo, PushBody
from tandem.spec import environment
from tandem.spec.package_names import PackageName, newest, normalized, skeleton, version_key

ORG_BYTES = 4 * 2**30
"""The most bytes of all wheels of an org."""
_TAKEN = frozenset(map(skeleton, (*BUILT_IN, *ADAPTERS, "tandem", "tandem-rl")))
_MOST_NAME = 100


class Shelf:
    """The files of the wheels, by SHA-256, and the key that signs where they came from."""

    def __init__(self, directory: Path, signer: Signer) -> None:
        self.directory, self.signer = directory, signer
        atomic_write.make_directory(directory, mode=atomic_write.PRIVATE)

    def put(self, content: WheelContent, wheel: bytes) -> None:
        """Keep the bytes. A file that is there already is the same."""
        path = self.path(content.sha256)
        if not path.exists():
            atomic_write.write_bytes(path, wheel, mode=0o600)

    def read(self, sha256: str) -> bytes:
        """Return the bytes of a wheel. StoreError if they are not those that were pushed."""
        wheel = self.path(sha256).read_bytes()
        if hashlib.sha256(wheel).hexdigest() != sha256:
            raise StoreError(f"{self.path(sha256)}: was changed on the disk; restore it from a backup")
        return wheel

    def path(self, sha256: str) -> Path:
        return self.directory / f"{sha256}.whl"


def check_push(session: Session, caller: Caller, content: WheelContent, body: PushBody) -> PackageVersion | None:
    """Return the row of this very file if it was pushed before. Conflict if the name or the version is not free."""
    _check_name(session, caller, content)
    row = session.get(Package, content.distribution)
    if row is not None and (row.org != caller.org or (caller.project and row.project not in ("", caller.project))):
        raise Conflict(f"'{content.distribution}' belongs to another org or project", field="file")
    if row is None:
        alike = session.scalar(sa.select(Package.org).where(Package.skeleton == skeleton(content.distribution)))
        if alike is not None:
            raise Conflict(
                f"'{content.distribution}' looks like the name of a package that exists; take another", field="file"
            )
    elif caller.project and not row.project:
        raise Conflict(f"'{content.distribution}' is of the whole org, and this key of one project", field="file")
    for each in _versions(session, content.distribution) if row is not None else ():
        if version_key(each.version) == version_key(content.version):
            if (each.version, each.sha256) == (content.version, content.sha256):
                return each
            raise Conflict(
                f"{content.distribution} {each.version} exists with other bytes (sha256 {each.sha256[:12]}); versions "
                "never change: give it a new number",
                field="file",
            )
    used = session.scalar(sa.select(sa.func.sum(PackageVersion.size)).where(PackageVersion.org == caller.org)) or 0
    if used + content.size > ORG_BYTES:
        raise Conflict(f"the wheels of this org would have more than {ORG_BYTES:,} bytes", field="wheel")
    return None


def _check_name(session: Session, caller: Caller, content: WheelContent) -> None:
    org = session.get_one(Org, caller.org)
    prefix = f"{normalized(org.name)}-"
    rest = content.distribution.removeprefix(prefix)
    if not content.distribution.startswith(prefix) or not rest or len(content.distribution) > _MOST_NAME:
        raise Conflict(
            f"'{content.distribution}': the name of a package of this org begins with '{prefix}'; write name = "
            f'"{prefix}{content.distribution:.40}" in pyproject.toml',
            field="file",
        )
    first = session.scalars(sa.select(Org).order_by(Org.at, Org.id))
    owner = next(each for each in first if skeleton(each.name) == skeleton(org.name))
    if owner.id != org.id:
        raise Conflict(f"the prefix '{prefix}' is that of an older org, whose name looks like yours", field="file")
    if skeleton(rest) in _TAKEN or skeleton(org.name) in _TAKEN:
        raise Conflict(
            f"'{content.distribution}' looks like an environment of Tandem's own; take another", field="file"
        )


def push(
    session: Session, caller: Caller, content: WheelContent, body: PushBody, shelf: Shelf, versions: Mapping[str, str],
    now: int,
) -> PackageVersionInfo:  # fmt: skip
    """Add a version, whose file is on the shelf. `versions`: of the programs that take part, for its provenance."""
    known = check_push(session, caller, content, body)
    if known is not None:
        return version_info(session.get_one(Package, known.package), known)
    row = session.get(Package, content.distribution)
    if row is None:
        project = caller.project or (queries.project_of(session, caller, body.project) if body.project else "")
        org = session.get_one(Org, caller.org).name
        rest = content.distribution.removeprefix(f"{normalized(org)}-")
        row = Package(
            id=content.distribution, org=caller.org, project=project, title=f"{normalized(org)}/{rest}",
            skeleton=skeleton(content.distribution), at=now,
        )  # fmt: skip
        session.add(row)
        session.flush()
    told = {
        "requires_python": content.requires_python, "requires": list(content.requires), "summary": content.summary,
        "environments": dict(content.environments),
    }  # fmt: skip
    who = {"org": session.get_one(Org, caller.org).name, "key": caller.key}
    predicate = {
        "package": row.title, "version": content.version, "pushed_by": who, "at": now,
        "metadata_sha256": content.metadata_sha256, "build": dict(body.build), "checks": dict(body.checks),
        "versions": dict(versions), **told,
    }  # fmt: skip
    made = PackageVersion(
        package=row.id, version=content.version, org=caller.org, at=now, file=content.file, sha256=content.sha256,
        size=content.size, metadata_text=content.metadata, told=told,
        provenance=shelf.signer.envelope(content.file, content.sha256, predicate), pushed_by=caller.key, yanked_at=0,
        yanked_why="",
    )  # fmt: skip
    session.add(made)
    session.flush()
    return version_info(row, made)


def yank(session: Session, row: Package, version: str, why: str, undo: bool, now: int) -> PackageVersionInfo:
    """Take a version out of what is chosen by default, or put it back."""
    found = session.get(PackageVersion, (row.id, version))
    if found is None:
        raise NotKnown(f"{row.title} has no version '{version:.60}'", field="version")
    if undo:
        found.yanked_at, found.yanked_why = 0, ""
    else:
        found.yanked_at, found.yanked_why = found.yanked_at or now, why or found.yanked_why
    session.flush()
    return version_info(row, found)


def with_versions(session: Session, caller: Caller, project: str, spec_toml: str) -> str:
    """Return a checked spec with a version of each package that it names: the newest one that its project sees now, if
    none is written. So every attempt plays the same, and the spec repeats the run."""
    tables = tomllib.loads(spec_toml)
    seen_by = Caller(caller.key, caller.org, caller.scopes, project)

    def version_of(wanted: PackageName) -> str:
        try:
            there = versions(session, find(session, seen_by, wanted.distribution))
        except NotKnown:
            raise SpecError(
                f"environment.name = '{wanted.title}': the run's project sees no package of this name here; "
                "`tandem env list --index` lists those that your key may see"
            ) from None
        if not (free := [each.version for each in there if not each.yanked_at]):
            raise SpecError(f"environment.name = '{wanted.title}': every version of it was yanked; name one")
        return newest(free)

    tables["environment"] = environment.with_versions(tables["environment"], version_of)
    return tomli_w.dumps(tables)


def find(session: Session, caller: Caller, name: str, *, to_change: bool = False) -> Package:
    """Return a package by its distribution's name. NotKnown otherwise, also if it is another's."""
    asked = sa.select(Package).where(Package.id == normalized(name), *_seen_by(caller))
    row = session.scalar(asked) if name.isprintable() and name.isascii() else None
    if row is None:
        raise NotKnown(f"there is no package '{name:.60}'", field="package")
    if to_change and caller.project and not row.project:
        raise Conflict(f"'{row.title}' is of the whole org, and this key of one project")
    return row


def listed(session: Session, caller: Caller) -> list[Package]:
    return list(session.scalars(sa.select(Package).where(*_seen_by(caller)).order_by(Package.id)))


def versions(session: Session, row: Package) -> list[PackageVersion]:
    """Return the versions of a package, the oldest number first."""
    return sorted(_versions(session, row.id), key=lambda each: version_key(each.version))


def file_of(session: Session, row: Package, file: str) -> PackageVersion:
    asked = sa.select(PackageVersion).where(PackageVersion.package == row.id, PackageVersion.file == file)
    found = session.scalar(asked) if file.isprintable() else None
    if found is None:
        raise NotKnown(f"there is no file '{file:.60}'", field="file")
    return found


def info(session: Session, row: Package) -> PackageInfo:
    project = session.get_one(Project, row.project).name if row.project else ""
    rows = [version_info(row, each) for each in versions(session, row)]
    return PackageInfo(id=row.id, title=row.title, project=project, at=row.at, versions=rows)


def version_info(row: Package, each: PackageVersion) -> PackageVersionInfo:
    return PackageVersionInfo(
        id=row.id, title=row.title, version=each.version, file=each.file, sha256=each.sha256, size=each.size,
        pushed_by=each.pushed_by, at=each.at, yanked_at=each.yanked_at, yanked_why=each.yanked_why, **each.told,
    )  # fmt: skip


def caller_for(session: Session, attempt: str, now: Callable[[], int]) -> Caller:
    """Return what an attempt's agent may see: what its run's project sees. Fenced unless it is claimed."""
    row = session.get(Attempt, attempt)
    if row is None or row.state != "claimed" or now() >= row.lease_until:
        raise Fenced(f"attempt '{attempt:.40}' is not claimed, or has ended: it installs nothing")
    run = session.get_one(Run, row.run)
    return Caller(row.id, run.org, frozenset({"runs:read"}), run.project)


def _seen_by(caller: Caller) -> Sequence[sa.ColumnElement[bool]]:
    limited = [Package.project.in_(("", caller.project))] if caller.project else []
    return [Package.org == caller.org, *limited]


def _versions(session: Session, package: str) -> Sequence[PackageVersion]:
    return session.scalars(sa.select(PackageVersion).where(PackageVersion.package == package)).all()
