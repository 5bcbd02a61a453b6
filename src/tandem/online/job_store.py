"""The database of an online server: jobs, versions, the active version, and the audit log.

    queued -> running -> publishing -> published
                 |            +-> failed (the engine refused it)
                 +-> rejected | failed | cancelled | queued (the trainer died)

One transaction takes a job to `publishing`, adds its version and makes it the active one. A restart finds all of that
or nothing of it. A job gets its version number when it starts; that number is never used again.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from tandem.errors import Conflict, KeyReused, NotKnown, QueueFull
from tandem.io.request_key import RequestKey
from tandem.io.sqlite_store import Durable, read_only
from tandem.online.messages import Sequence1, Teaching

JobState: TypeAlias = Literal["queued", "running", "publishing", "published", "rejected", "failed", "cancelled"]
ENDED = frozenset({"published", "rejected", "failed", "cancelled"})
KEYS_KEPT_S = 7 * 86400.0

_SCHEMA = [
    """
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY, id TEXT UNIQUE, state TEXT NOT NULL, who TEXT NOT NULL, source TEXT NOT NULL,
        created REAL NOT NULL, ended REAL, attempt INTEGER NOT NULL DEFAULT 0, version INTEGER, parent INTEGER,
        why TEXT NOT NULL DEFAULT '', teaching BLOB NOT NULL, groups BLOB NOT NULL, said BLOB NOT NULL,
        result BLOB NOT NULL DEFAULT x'7b7d');
    CREATE INDEX jobs_state ON jobs (state, number);
    CREATE TABLE versions (
        version INTEGER PRIMARY KEY, parent INTEGER, job TEXT, state TEXT NOT NULL, created REAL NOT NULL,
        digest TEXT NOT NULL, served TEXT NOT NULL DEFAULT '', bytes INTEGER NOT NULL DEFAULT 0);
    CREATE TABLE numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
    CREATE TABLE audit (
        number INTEGER PRIMARY KEY, at REAL NOT NULL, who TEXT NOT NULL, what TEXT NOT NULL, detail TEXT NOT NULL);
    CREATE TABLE keys (key TEXT PRIMARY KEY, digest BLOB NOT NULL, answer BLOB NOT NULL, at REAL NOT NULL);
    INSERT INTO numbers VALUES ('active', -1), ('next', 1);
    """,
    "ALTER TABLE jobs ADD COLUMN called_off INTEGER NOT NULL DEFAULT 0",
]


def active_version(directory: Path) -> int:
    """Return the active version. The server that owns the store may be running meanwhile."""
    with read_only(directory) as connection:
        return int(connection.execute("SELECT value FROM numbers WHERE name = 'active'").fetchone()[0])


@dataclass(frozen=True)
class LearningJob:
    """A row of the jobs table, without its samples."""

    id: str
    number: int
    state: JobState
    who: str
    source: str
    created: float
    ended: float | None
    attempt: int
    version: int | None
    parent: int | None
    why: str
    teaching: Teaching
    result: dict[str, Any]

    def row(self) -> dict[str, Any]:
        """Return it as JSON, for the routes."""
        fields = {name: getattr(self, name) for name in _ROW_FIELDS}
        return fields | {"teaching": msgspec.to_builtins(self.teaching), **self.result}


_ROW_FIELDS = ("id", "state", "who", "source", "created", "ended", "attempt", "version", "parent", "why")
_COLUMNS = "id, number, state, who, source, created, ended, attempt, version, parent, why, teaching, result"
_OF_VERSIONS = "version, parent, job, state, created, digest, served, bytes"
_GROUPS = msgspec.json.Decoder(list[list[Sequence1]])
_TEACHING = msgspec.json.Decoder(Teaching)


class JobStore:
    """A read sees what is committed, without waiting; a write is on the disk when it returns."""

    def __init__(self, directory: Path, *, max_queued: int = 1000) -> None:
        self._durable = Durable(directory, _SCHEMA)
        self._max_queued = max_queued

    @property
    def broken(self) -> str:
        return self._durable.broken

    def close(self) -> None:
        self._durable.close()

    # --- reads

    @property
    def active(self) -> int:
        """The active version; -1: no version was ever served."""
        return int(self._durable.read("SELECT value FROM numbers WHERE name = 'active'")[0][0])

    def job(self, id: str) -> LearningJob:
        rows = self._durable.read(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (id,))
        if not rows:
            raise NotKnown(f"there is no job '{id:.80}'")
        return _job(rows[0])

    def jobs(self, most: int, states: Sequence[str] = ()) -> list[LearningJob]:
        """Return all jobs, newest first; or those in some states, oldest first."""
        if not states:
            return [
                _job(row)
                for row in self._durable.read(f"SELECT {_COLUMNS} FROM jobs ORDER BY number DESC LIMIT ?", (most,))
            ]
        marks = ", ".join("?" * len(states))
        sql = f"SELECT {_COLUMNS} FROM jobs WHERE state IN ({marks}) ORDER BY number LIMIT ?"
        return [_job(row) for row in self._durable.read(sql, (*states, most))]

    def groups(self, id: str) -> list[list[Sequence1]]:
        return _GROUPS.decode(self._durable.read("SELECT groups FROM jobs WHERE id = ?", (id,))[0][0])

    def said(self, id: str) -> Any:
        """Return the samples as the client sent them."""
        return json.loads(self._durable.read("SELECT said FROM jobs WHERE id = ?", (id,))[0][0])

    def versions(self, most: int, before: int) -> list[dict[str, Any]]:
        """Return the newest versions below `before`, oldest first."""
        sql = f"SELECT {_OF_VERSIONS} FROM versions WHERE version < ? ORDER BY version DESC LIMIT ?"
        return [_version(row) for row in reversed(self._durable.read(sql, (before, most)))]

    def version(self, version: int) -> dict[str, Any]:
        rows = self._durable.read(f"SELECT {_OF_VERSIONS} FROM versions WHERE version = ?", (version,))
        if not rows:
            raise NotKnown(f"there is no version {version}")
        return _version(rows[0])

    def usable(self) -> list[int]:
        """Return the versions that can be served, oldest first."""
        sql = "SELECT version FROM versions WHERE state = 'kept' ORDER BY version"
        return [int(row[0]) for row in self._durable.read(sql)]

    def lineage(self, version: int) -> set[int]:
        """Return this version and all its ancestors."""
        sql = (
            "WITH RECURSIVE line(version) AS (SELECT ? UNION SELECT versions.parent FROM versions JOIN line "
            "ON versions.version = line.version WHERE versions.parent IS NOT NULL) SELECT version FROM line"
        )
        return {int(row[0]) for row in self._durable.read(sql, (version,))}

    def audit(self, most: int) -> list[dict[str, Any]]:
        rows = self._durable.read("SELECT at, who, what, detail FROM audit ORDER BY number DESC LIMIT ?", (most,))
        return [{"at": at, "who": who, "what": what, **json.loads(detail)} for at, who, what, detail in rows]

    def count(self) -> dict[str, int]:
        return {
            str(state): int(n) for state, n in self._durable.read("SELECT state, count(*) FROM jobs GROUP BY state")
        }

    def answered(self, once: RequestKey) -> dict[str, Any] | None:
        """Return the reply that this write request got before, if any. KeyReused: its key came with another request."""
        rows = self._durable.read("SELECT digest, answer FROM keys WHERE key = ?", (once.key,))
        if not rows:
            return None
        if rows[0][0] != once.digest:
            raise KeyReused(f"Idempotency-Key '{once.key}' was used for another request; use a new key")
        return json.loads(rows[0][1])

    # --- writes

    async def add(
        self,
        groups: Sequence[Sequence[Sequence1]],
        teaching: Teaching,
        *,
        who: str,
        source: str,
        said: bytes,
        once: RequestKey,
    ) -> dict[str, Any]:
        """Queue a job. `said`: the samples as JSON, as the client sent them."""
        packed = msgspec.json.encode(groups), msgspec.json.encode(teaching), said

        def change(db: sqlite3.Connection) -> dict[str, Any]:
            if (reply := _answered(db, once)) is not None:
                return reply
            (waiting,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
            if waiting >= self._max_queued:
                raise QueueFull(
                    f"{waiting} jobs are queued, the most allowed is {self._max_queued}; send it again later"
                )
            id = uuid.uuid4().hex
            db.execute(
                "INSERT INTO jobs (id, state, who, source, created, groups, teaching, said) VALUES (?,?,?,?,?,?,?,?)",
                (id, "queued", who, source, time.time(), *packed),
            )
            _note(db, who, "train", {"job": id, "source": source, "samples": len(groups)})
            return _answer(db, once, {"id": id, "state": "queued"})

        return await self._durable.write(change)

    async def first(self, version: int, digest: str) -> None:
        """Add the version that the server starts with, and make it active."""

        def change(db: sqlite3.Connection) -> None:
            _insert_version(db, version, None, None, digest, 0)
            _set(db, "active", version)
            _note(db, "server", "first", {"version": version})

        await self._durable.write(change)

    async def begin(self, id: str) -> LearningJob:
        """Start the job, and give it a version number that is never used again."""

        def change(db: sqlite3.Connection) -> None:
            (version,) = db.execute("SELECT value FROM numbers WHERE name = 'next'").fetchone()
            (parent,) = db.execute("SELECT value FROM numbers WHERE name = 'active'").fetchone()
            _set(db, "next", version + 1)
            done = db.execute(
                "UPDATE jobs SET state = 'running', attempt = attempt + 1, version = ?, parent = ? "
                "WHERE id = ? AND state = 'queued'",
                (version, parent, id),
            )
            if not done.rowcount:
                raise Conflict(f"job '{id}' is not queued any more")

        await self._durable.write(change)
        return self.job(id)

    async def requeue(self, id: str, why: str, *, counts: bool = True) -> None:
        """Queue a running job again; end it instead if a client cancelled it. `counts`: as one of its attempts."""

        def change(db: sqlite3.Connection) -> None:
            (called_off,) = db.execute("SELECT called_off FROM jobs WHERE id = ?", (id,)).fetchone()
            if called_off:
                return _end(db, id, "cancelled", "it was cancelled")
            sql = "UPDATE jobs SET state = 'queued', version = NULL, why = ?, attempt = attempt - ? WHERE id = ?"
            db.execute(sql, (why, 0 if counts else 1, id))
            _note(db, "server", "again", {"job": id, "why": why})

        await self._durable.write(change)

    async def commit(self, job: LearningJob, digest: str, size_bytes: int, result: Mapping[str, Any]) -> bool:
        """Add the job's version and make it active: from now on a restart serves it. Return False if the job was
        cancelled meanwhile; then the version does not exist."""

        def change(db: sqlite3.Connection) -> bool:
            assert job.version is not None
            (called_off,) = db.execute("SELECT called_off FROM jobs WHERE id = ?", (job.id,)).fetchone()
            if called_off:
                _end(db, job.id, "cancelled", "it was cancelled")
                return False
            _insert_version(db, job.version, job.parent, job.id, digest, size_bytes)
            _set(db, "active", job.version)
            db.execute("UPDATE jobs SET state = 'publishing', result = ? WHERE id = ?", (_bytes(result), job.id))
            return True

        return await self._durable.write(change)

    async def end(self, id: str, state: JobState, why: str = "", result: Mapping[str, Any] | None = None) -> None:
        def change(db: sqlite3.Connection) -> None:
            _end(db, id, state, why)
            if result is not None:
                db.execute("UPDATE jobs SET result = ? WHERE id = ?", (_bytes(result), id))

        await self._durable.write(change)

    async def refused(self, job: LearningJob, why: str) -> None:
        """Undo the commit of a version that the engine refused. Its number stays used."""

        def change(db: sqlite3.Connection) -> None:
            db.execute("UPDATE versions SET state = 'dropped' WHERE version = ?", (job.version,))
            _set(db, "active", job.parent if job.parent is not None else 0)
            db.execute("UPDATE jobs SET state = 'failed', why = ?, ended = ? WHERE id = ?", (why, time.time(), job.id))
            _note(db, "server", "refused", {"job": job.id, "version": job.version, "why": why})

        await self._durable.write(change)

    async def cancel(self, id: str, who: str) -> JobState:
        """Cancel a queued job, and mark a running one so that it is not queued again. Return the job's state."""

        def change(db: sqlite3.Connection) -> JobState:
            row = db.execute("SELECT state FROM jobs WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise NotKnown(f"there is no job '{id:.80}'")
            if row[0] == "queued":
                db.execute("UPDATE jobs SET state = 'cancelled', ended = ? WHERE id = ?", (time.time(), id))
                _note(db, who, "cancelled", {"job": id})
                return "cancelled"
            if row[0] == "running":
                db.execute("UPDATE jobs SET called_off = 1 WHERE id = ?", (id,))
                _note(db, who, "cancelling", {"job": id})
            return row[0]

        return await self._durable.write(change)

    async def activate(self, version: int, who: str, why: str) -> int:
        """Make a kept version the active one; return the one before."""

        def change(db: sqlite3.Connection) -> int:
            row = db.execute("SELECT state FROM versions WHERE version = ?", (version,)).fetchone()
            if row is None:
                raise NotKnown(f"there is no version {version}")
            if row[0] != "kept":
                raise Conflict(f"version {version} is {row[0]}: only a kept version can be served")
            (before,) = db.execute("SELECT value FROM numbers WHERE name = 'active'").fetchone()
            _set(db, "active", version)
            _note(db, who, "activate", {"version": version, "before": before, "why": why})
            return int(before)

        return await self._durable.write(change)

    async def served(self, version: int, digest: str) -> None:
        """Store the digest that the engine proved for this version the first time."""
        await self._durable.write(
            lambda db: db.execute("UPDATE versions SET served = ? WHERE version = ? AND served = ''", (digest, version))
        )

    async def mark(self, versions: Sequence[int], state: str, why: str) -> None:
        def change(db: sqlite3.Connection) -> None:
            for version in versions:
                db.execute("UPDATE versions SET state = ? WHERE version = ?", (state, version))
            _note(db, "server", state, {"versions": list(versions), "why": why})

        await self._durable.write(change)

    async def note(self, who: str, what: str, detail: Mapping[str, Any]) -> None:
        await self._durable.write(lambda db: _note(db, who, what, detail))

    async def answer(self, once: RequestKey, reply: Mapping[str, Any]) -> dict[str, Any]:
        """Store the reply to a write request, and return it; or the reply that is stored already."""

        def change(db: sqlite3.Connection) -> dict[str, Any]:
            found = _answered(db, once)
            return _answer(db, once, dict(reply)) if found is None else found

        return await self._durable.write(change)


def _answered(db: sqlite3.Connection, once: RequestKey) -> dict[str, Any] | None:
    row = db.execute("SELECT digest, answer FROM keys WHERE key = ?", (once.key,)).fetchone()
    if row is not None and row[0] != once.digest:
        raise KeyReused(f"Idempotency-Key '{once.key}' was used for another request; use a new key")
    return None if row is None else json.loads(row[1])


def _answer(db: sqlite3.Connection, once: RequestKey, reply: dict[str, Any]) -> dict[str, Any]:
    now = time.time()
    db.execute("DELETE FROM keys WHERE at < ?", (now - KEYS_KEPT_S,))
    db.execute("INSERT INTO keys VALUES (?, ?, ?, ?)", (once.key, once.digest, _bytes(reply), now))
    return reply


def _end(db: sqlite3.Connection, id: str, state: JobState, why: str) -> None:
    db.execute("UPDATE jobs SET state = ?, why = ?, ended = ? WHERE id = ?", (state, why, time.time(), id))
    _note(db, "server", state, {"job": id, "why": why})


def _insert_version(
    db: sqlite3.Connection, version: int, parent: int | None, job: str | None, digest: str, size_bytes: int
) -> None:
    db.execute(
        "INSERT INTO versions (version, parent, job, state, created, digest, bytes) VALUES (?, ?, ?, 'kept', ?, ?, ?)",
        (version, parent, job, time.time(), digest, size_bytes),
    )


def _set(db: sqlite3.Connection, name: str, value: int) -> None:
    db.execute("UPDATE numbers SET value = ? WHERE name = ?", (value, name))


def _note(db: sqlite3.Connection, who: str, what: str, detail: Mapping[str, Any]) -> None:
    db.execute("INSERT INTO audit (at, who, what, detail) VALUES (?, ?, ?, ?)", (time.time(), who, what, _text(detail)))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _bytes(value: Any) -> bytes:
    return _text(value).encode()


def _job(row: tuple[Any, ...]) -> LearningJob:
    *plain, teaching, result = row
    return LearningJob(*plain, teaching=_TEACHING.decode(teaching), result=json.loads(result))


def _version(row: tuple[Any, ...]) -> dict[str, Any]:
    names = ("version", "parent", "job", "state", "created", "digest", "served_digest", "bytes")
    return dict(zip(names, row, strict=True))
