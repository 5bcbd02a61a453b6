"""Copy, restore, upgrade and check the data directory of a control plane.

A backup may be taken while the server runs: SQLite copies one committed state. The others need the server to be ended,
and say so.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session

from tandem.control import migrate
from tandem.control.audit import HEAD_FILE, AuditLog, Verified, leave_note
from tandem.control.decide import ENDED
from tandem.control.sealing import MASTER_FILE
from tandem.control.store import FILE, Store
from tandem.control.tables import Attempt, Run, Usage
from tandem.control.tokens import SECRET_FILE
from tandem.errors import SpecError, StoreError, StoreOwned
from tandem.io import atomic_write
from tandem.io.provenance import KEY_FILE, PUBLIC_FILE
from tandem.io.sqlite_store import owned

MIRRORS, PACKAGES = "runs", "packages"
_SMALL = (SECRET_FILE, MASTER_FILE, "token", HEAD_FILE, KEY_FILE, PUBLIC_FILE)
_ROOM_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One thing that `tandem control doctor` looked at."""

    what: str
    ok: bool
    says: str


def backup(data_dir: Path, to: Path, *, mirrors: bool) -> int:
    """Copy a SQLite database, its secrets and, if asked, the mirrors into a new directory; return the bytes."""
    if not (data_dir / FILE).exists():
        raise SpecError(
            f"--data-dir = '{data_dir}': has no {FILE}; name the directory of `tandem control serve`. A PostgreSQL "
            "database is copied by pg_dump; then copy this directory beside it"
        )
    if to.exists():
        raise SpecError(f"{to}: exists; name a directory that does not")
    with atomic_write.directory(to) as fresh:
        for name in _SMALL:
            if (data_dir / name).exists():
                shutil.copy2(data_dir / name, fresh / name)
        if mirrors and (data_dir / MIRRORS).exists():  # before the database: it names no file that is not there
            shutil.copytree(data_dir / MIRRORS, fresh / MIRRORS, ignore=shutil.ignore_patterns(".*.tmp"))
        _copy_database(data_dir / FILE, fresh / FILE)
        if (data_dir / PACKAGES).exists():  # after the database: a wheel is written before its row, and never deleted
            shutil.copytree(data_dir / PACKAGES, fresh / PACKAGES, ignore=shutil.ignore_patterns(".*.tmp"))
        os.chmod(fresh, atomic_write.PRIVATE)
    leave_note(data_dir, "control backup", to=to)
    return sum(path.stat().st_size for path in to.rglob("*") if path.is_file())


def restore(source: Path, data_dir: Path) -> str:
    """Copy a backup into a new data directory; return the revision of its database."""
    if not (source / FILE).exists():
        raise SpecError(f"{source}: has no {FILE}; name a directory that `tandem control backup` wrote")
    if data_dir.exists() and any(data_dir.iterdir()):
        raise SpecError(f"--data-dir = '{data_dir}': is not empty; a backup is restored into a new directory")
    if problem := _integrity(source / FILE):
        raise StoreError(f"{source / FILE}: the backup is damaged: {problem}")
    if data_dir.exists():
        data_dir.rmdir()
    with atomic_write.directory(data_dir) as fresh:
        shutil.copytree(source, fresh, dirs_exist_ok=True)
        os.chmod(fresh, atomic_write.PRIVATE)
    leave_note(data_dir, "control restore", source=source)
    return _upgraded(data_dir, "")


def upgrade(data_dir: Path, database: str) -> tuple[str, str]:
    """Bring the database to this release's tables; return its revisions before and after. `tandem control serve` does
    the same when it starts."""
    before, after = _revision(data_dir / FILE, database), _upgraded(data_dir, database)
    if before != after:
        leave_note(data_dir, "control upgrade", before=before, after=after)
    return before, after


def _upgraded(data_dir: Path, database: str) -> str:
    Store(data_dir, database).close()
    return migrate.head()


def verify(data_dir: Path, database: str) -> Verified:
    """Check that the audit log is as it was written. Nothing is changed."""
    secret = data_dir / SECRET_FILE
    if not secret.exists() or not (database or (data_dir / FILE).exists()):
        raise SpecError(f"--data-dir = '{data_dir}': name the directory of `tandem control serve`, and its --database")
    engine = sa.create_engine(database or f"sqlite:///{data_dir / FILE}")
    try:
        with Session(engine) as session:
            return AuditLog(secret.read_bytes(), data_dir).verify(session)
    except exc.DBAPIError as error:
        raise StoreError(f"the database does not answer: {error.orig}") from error
    finally:
        engine.dispose()


def doctor(data_dir: Path, database: str) -> Iterator[DoctorCheck]:
    """Check a data directory and its database. Nothing is changed."""
    if not data_dir.is_dir():
        yield DoctorCheck("data directory", False, f"{data_dir} does not exist; `tandem control serve` makes it")
        return
    open_to = data_dir.stat().st_mode & 0o077
    yield DoctorCheck(
        "data directory", not open_to, f"other users may enter; chmod 700 {data_dir}" if open_to else "private"
    )
    free = shutil.disk_usage(data_dir).free
    yield DoctorCheck("disk", free > _ROOM_BYTES, f"{free / 2**30:.1f} GiB free")
    try:
        with owned(data_dir):
            yield DoctorCheck("server", True, "not running")
    except StoreOwned:
        yield DoctorCheck("server", True, "running")
    if not database and not (data_dir / FILE).exists():
        yield DoctorCheck("database", False, f"no {FILE}; with PostgreSQL name it by --database")
        return
    if not database and (problem := _integrity(data_dir / FILE)):
        yield DoctorCheck("database", False, f"damaged: {problem}; restore a backup")
        return
    checks = list(_database(sa.create_engine(database or f"sqlite:///{data_dir / FILE}")))
    yield from checks
    if all(each.ok for each in checks) and (data_dir / SECRET_FILE).exists():
        audit = verify(data_dir, database)
        yield DoctorCheck("audit log", not audit.problem, audit.problem or f"{audit.rows} rows, as they were written")


def _database(engine: sa.Engine) -> Iterator[DoctorCheck]:
    try:
        with engine.connect() as connection:
            found, head = migrate.revision(connection), migrate.head()
            says = "up to date" if found == head else f"revision {found}, this Tandem has {head}"
            yield DoctorCheck("tables", found == head, says if found == head else f"{says}; `tandem control upgrade`")
            if found != head:
                return
            live = connection.scalar(sa.select(sa.func.count()).where(Run.state.not_in(ENDED)))
            claimed = connection.scalar(sa.select(sa.func.count()).where(Attempt.state == "claimed"))
            wrong = uncounted(connection)
            yield DoctorCheck("usage", not wrong, wrong or "the seconds of every closed attempt, once")
            yield DoctorCheck("runs", True, f"{live} on their way, {claimed} of them on a machine")
    except exc.DBAPIError as error:
        yield DoctorCheck("database", False, f"does not answer: {error.orig}")
    finally:
        engine.dispose()


def uncounted(connection: sa.Connection) -> str:
    """Return which attempt's seconds are not those of its row of usage; empty if all are."""
    ended = sa.case((Attempt.ended_at > 0, Attempt.ended_at), else_=sa.func.min(Attempt.closed_at, Attempt.lease_until))
    if connection.dialect.name == "postgresql":
        ended = sa.case(
            (Attempt.ended_at > 0, Attempt.ended_at), else_=sa.func.least(Attempt.closed_at, Attempt.lease_until)
        )
    used = sa.case((ended > Attempt.claimed_at, ended - Attempt.claimed_at), else_=0)
    other = sa.func.coalesce(Usage.ended - Usage.began, -1) != used
    asked = (
        sa.select(Attempt.id)
        .outerjoin(Usage, Usage.key == Attempt.id + ":compute")
        .where(Attempt.state == "closed", Attempt.claimed_at > 0, other)
    )
    if (attempt := connection.scalar(asked.limit(1))) is not None:
        return f"attempt {attempt} is not counted with its seconds"
    rows = connection.scalar(sa.select(sa.func.count()).select_from(Usage)) or 0
    closed = sa.select(sa.func.count()).where(Attempt.state == "closed", Attempt.claimed_at > 0)
    count = connection.scalar(closed) or 0
    return "" if rows == count else f"{rows} rows for {count} attempts"


def _copy_database(source: Path, to: Path) -> None:
    """Copy one committed state of a SQLite database, also while a server writes it."""
    os.close(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(_opened(source)) as reading, closing(sqlite3.connect(to)) as writing:
        reading.backup(writing)
        writing.execute("PRAGMA journal_mode=DELETE")  # one file, which can be copied
    atomic_write.sync(to)


def _integrity(path: Path) -> str:
    try:
        with closing(_opened(path)) as connection:
            found = connection.execute("PRAGMA quick_check").fetchone()[0]
            return "" if found == "ok" else str(found)
    except sqlite3.DatabaseError as error:
        return str(error)


def _revision(path: Path, database: str) -> str:
    if not database and not path.exists():
        return ""
    engine = sa.create_engine(database or f"sqlite:///{path}")
    try:
        with engine.connect() as connection:
            return migrate.revision(connection)
    except exc.DBAPIError as error:
        raise StoreError(f"the database does not answer: {error.orig}") from error
    finally:
        engine.dispose()


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=30)
