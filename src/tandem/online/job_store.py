"""What was asked, what became of it, and which version is active: one table each, and the one commit point.

    queued -> running -> publishing -> published
                 |            +-> failed (the engine refused it)
                 +-> rejected | failed | cancelled | queued (the trainer died)

`publishing` begins with one transaction: the version exists, it is the active one, the job is its maker. Until then a
restart finds everything as before; from then on as after. Numbers of versions are taken for good when a job starts.
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
    """Return which version is the active one, read beside a server that may own the store."""
    with read_only(directory) as connection:
        return int(connection.execute("SELECT value FROM numbers WHERE name = 'active'").fetchone()[0])


@dataclass(frozen=True)
class Job:
    """A row, with what is to be trained."""

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
        """For people and programs; JSON."""
        told = {name: getattr(self, name) for name in _TOLD}
        return told | {"teaching": msgspec.to_builtins(self.teaching), **self.result}


_TOLD = ("id", "state", "who", "source", "created", "ended", "attempt", "version", "parent", "why")
_COLUMNS = "id, number, state, who, source, created, ended, attempt, version, parent, why, teaching, result"
_OF_VERSIONS = "version, parent, job, state, created, digest, served, bytes"
_GROUPS = msgspec.json.Decoder(list[list[Sequence1]])
_TEACHING = msgspec.json.Decoder(Teaching)


class JobStore:
    """Reads are of what is committed, at once; writes are on the disk when they return."""

    def __init__(self, directory: Path, *, max_queued: int = 1000) -> None:
        self._durable = Durable(directory, _SCHEMA)
        self._max_queued = max_queued

    @property
    def broken(self) -> str:
        return self._durable.broken

    def close(self) -> None:
        self._durable.close()

    # --- questions

    @property
    def active(self) -> int:
        """-1: nothing was ever served."""
        return int(self._durable.read("SELECT value FROM numbers WHERE name = 'active'")[0][0])

    def job(self, id: str) -> Job:
        rows = self._durable.read(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (id,))
        if not rows:
            raise NotKnown(f"there is no job '{id:.80}'")
        return _job(rows[0])

    def jobs(self, most: int, states: Sequence[str] = ()) -> list[Job]:
        """The newest first; of some states: the oldest first."""
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
        """The samples as they were sent."""
        return json.loads(self._durable.read("SELECT said FROM jobs WHERE id = ?", (id,))[0][0])

    def versions(self, most: int, before: int) -> list[dict[str, Any]]:
        """The newest of those before one, oldest first."""
        sql = f"SELECT {_OF_VERSIONS} FROM versions WHERE version < ? ORDER BY version DESC LIMIT ?"
        return [_version(row) for row in reversed(self._durable.read(sql, (before, most)))]

    def version(self, version: int) -> dict[str, Any]:
        rows = self._durable.read(f"SELECT {_OF_VERSIONS} FROM versions WHERE version = ?", (version,))
        if not rows:
            raise NotKnown(f"there is no version {version}")
        return _version(rows[0])

    def usable(self) -> list[int]:
        """Oldest first."""
        sql = "SELECT version FROM versions WHERE state = 'kept' ORDER BY version"
        return [int(row[0]) for row in self._durable.read(sql)]

    def line(self, version: int) -> set[int]:
        """What it comes from, itself included, back to the first."""
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
        """What was answered to this very write before. KeyReused if its key came with another one."""
        rows = self._durable.read("SELECT digest, answer FROM keys WHERE key = ?", (once.key,))
        if not rows:
            return None
        if rows[0][0] != once.digest:
            raise KeyReused(f"Idempotency-Key '{once.key}' came before with another request; take a new one")
        return json.loads(rows[0][1])

    # --- changes

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
        """`said`: the samples as JSON, as the client sent them."""
        packed = msgspec.json.encode(groups), msgspec.json.encode(teaching), said

        def change(db: sqlite3.Connection) -> dict[str, Any]:
            if (reply := _answered(db, once)) is not None:
                return reply
            (waiting,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
            if waiting >= self._max_queued:
                raise QueueFull(f"{waiting} jobs wait, and {self._max_queued} may; send it again later")
            id = uuid.uuid4().hex
            db.execute(
                "INSERT INTO jobs (id, state, who, source, created, groups, teaching, said) VALUES (?,?,?,?,?,?,?,?)",
                (id, "queued", who, source, time.time(), *packed),
            )
            _note(db, who, "train", {"job": id, "source": source, "samples": len(groups)})
            return _answer(db, once, {"id": id, "state": "queued"})

        return await self._durable.write(change)

    async def first(self, version: int, digest: str) -> None:
        """The version that everything begins with."""

        def change(db: sqlite3.Connection) -> None:
            _insert_version(db, version, None, None, digest, 0)
            _set(db, "active", version)
            _note(db, "server", "first", {"version": version})

        await self._durable.write(change)

    async def begin(self, id: str) -> Job:
        """Begin the job, with a version number that is never used again."""

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
                raise Conflict(f"job '{id}' does not wait any more")

        await self._durable.write(change)
        return self.job(id)

    async def again(self, id: str, why: str, *, counts: bool = True) -> None:
        """Back to the queue, unless it was called off: nothing of it is left anywhere. `counts`: as an attempt."""

        def change(db: sqlite3.Connection) -> None:
            (called_off,) = db.execute("SELECT called_off FROM jobs WHERE id = ?", (id,)).fetchone()
            if called_off:
                return _end(db, id, "cancelled", "it was called off")
            sql = "UPDATE jobs SET state = 'queued', version = NULL, why = ?, attempt = attempt - ? WHERE id = ?"
            db.execute(sql, (why, 0 if counts else 1, id))
            _note(db, "server", "again", {"job": id, "why": why})

        await self._durable.write(change)

    async def commit(self, job: Job, digest: str, size_bytes: int, result: Mapping[str, Any]) -> bool:
        """The version is there and active: from now on, whatever is killed, it is what is served after a restart. False
        if the job was called off at the last moment: then it is cancelled, and there is no such version."""

        def change(db: sqlite3.Connection) -> bool:
            assert job.version is not None
            (called_off,) = db.execute("SELECT called_off FROM jobs WHERE id = ?", (job.id,)).fetchone()
            if called_off:
                _end(db, job.id, "cancelled", "it was called off")
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

    async def refused(self, job: Job, why: str) -> None:
        """The engine does not take what was committed: it is taken back, and its number stays used."""

        def change(db: sqlite3.Connection) -> None:
            db.execute("UPDATE versions SET state = 'dropped' WHERE version = ?", (job.version,))
            _set(db, "active", job.parent if job.parent is not None else 0)
            db.execute("UPDATE jobs SET state = 'failed', why = ?, ended = ? WHERE id = ?", (why, time.time(), job.id))
            _note(db, "server", "refused", {"job": job.id, "version": job.version, "why": why})

        await self._durable.write(change)

    async def cancel(self, id: str, who: str) -> JobState:
        """Of a job that waits. What it is in otherwise: one that is trained is not begun again."""

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
        """Makes a kept version the active one; the one before."""

        def change(db: sqlite3.Connection) -> int:
            row = db.execute("SELECT state FROM versions WHERE version = ?", (version,)).fetchone()
            if row is None:
                raise NotKnown(f"there is no version {version}")
            if row[0] != "kept":
                raise Conflict(f"version {version} is {row[0]}, and cannot be served")
            (before,) = db.execute("SELECT value FROM numbers WHERE name = 'active'").fetchone()
            _set(db, "active", version)
            _note(db, who, "activate", {"version": version, "before": before, "why": why})
            return int(before)

        return await self._durable.write(change)

    async def served(self, version: int, digest: str) -> None:
        """What an engine proved to serve as this version, the first time."""
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
        """Remembers what was answered; what was, if another was quicker."""

        def change(db: sqlite3.Connection) -> dict[str, Any]:
            found = _answered(db, once)
            return _answer(db, once, dict(reply)) if found is None else found

        return await self._durable.write(change)


def _answered(db: sqlite3.Connection, once: RequestKey) -> dict[str, Any] | None:
    row = db.execute("SELECT digest, answer FROM keys WHERE key = ?", (once.key,)).fetchone()
    if row is not None and row[0] != once.digest:
        raise KeyReused(f"Idempotency-Key '{once.key}' came before with another request; take a new one")
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


def _job(row: tuple[Any, ...]) -> Job:
    *plain, teaching, result = row
    return Job(*plain, teaching=_TEACHING.decode(teaching), result=json.loads(result))


def _version(row: tuple[Any, ...]) -> dict[str, Any]:
    names = ("version", "parent", "job", "state", "created", "digest", "served_digest", "bytes")
    return dict(zip(names, row, strict=True))
