"""A gateway's sessions on disk: open ones turn by turn, finished ones until they are delivered.

consumes: changes of Sessions, rewards     waits for: the disk, before a reply that promises durability
produces: groups of trajectories           a group is delivered once its sessions have finished; after a crash again
                                           under the same name, so that the receiver can ignore the second one
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tandem.errors import KeyReused
from tandem.io.request_key import RequestKey
from tandem.io.sqlite_store import Change, Durable
from tandem.rollout.sessions.tree import Session, TurnNode, trajectory_row, turn_of, turn_row
from tandem.types import Trajectory

_log = logging.getLogger(__name__)

_KEPT_S = 7 * 86400.0  # how long an idempotency key is kept

_SCHEMA = (
    """
    CREATE TABLE sessions (id TEXT PRIMARY KEY, automatic INTEGER, group_id TEXT, group_size INTEGER, task_id TEXT,
                           created REAL, rewards TEXT);
    CREATE TABLE turns (number INTEGER PRIMARY KEY, session TEXT, row TEXT);
    CREATE INDEX turns_of ON turns (session);
    CREATE TABLE finished (session TEXT PRIMARY KEY, group_id TEXT, group_size INTEGER, rows TEXT, leaves_as TEXT);
    CREATE INDEX finished_in ON finished (group_id);
    CREATE TABLE answers (key TEXT PRIMARY KEY, digest BLOB, reply TEXT, until REAL);
    CREATE INDEX answers_until ON answers (until);
    """,
    """
    CREATE TABLE refused (name TEXT PRIMARY KEY, group_id TEXT, reason TEXT, rows TEXT, at REAL);
    """,
)


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group whose sessions have all finished."""

    name: str
    group: str
    rows: list[dict[str, Any]]
    """Trajectories in the rollout service's JSON form."""


Deliver: TypeAlias = Callable[[FinishedGroup], Awaitable[None]]
"""Deliver a group and return. GroupRefused: the receiver will never accept it. Equal names are one group."""


class SessionStore:
    """The sink of Sessions. Turns are written without waiting: a power cut may lose the last ones, and a conversation
    then continues from the turn before."""

    def __init__(self, directory: Path) -> None:
        self.db = Durable(directory, _SCHEMA)

    @property
    def broken(self) -> str:
        return self.db.broken

    def close(self) -> None:
        self.db.close()

    # --- open sessions

    def opened(self, session: Session) -> None:
        self._submit(f"session {session.id}", lambda db: _open(db, session))

    def turn(self, session: Session, turn: TurnNode) -> None:
        row = json.dumps(turn_row(turn))
        insert = "INSERT INTO turns (session, row) VALUES (?,?)"
        self._submit(f"turn {turn.id} of session {session.id}", lambda db: db.execute(insert, (session.id, row)))

    def dropped(self, session: Session) -> None:
        self._submit(f"the end of session {session.id}", lambda db: _drop(db, session))

    def _submit(self, what: str, change: Change[Any]) -> None:
        """Write without waiting; log a failure."""

        def log_failure(written: Future[Any]) -> None:
            if not written.cancelled() and (error := written.exception()) is not None:
                _log.error("%s was not written to disk: %s: %s", what, type(error).__name__, error)

        self.db.submit(change).add_done_callback(log_failure)

    def open_sessions(self, now: float) -> list[Session]:
        """Return the stored sessions. Turns that a full disk lost are missing, and so are turns after them."""
        sessions: dict[str, Session] = {}
        for row in self.db.read("SELECT * FROM sessions ORDER BY created"):
            id, automatic, group, group_size, task_id, created, rewards = row
            sessions[id] = Session(id, bool(automatic), group, group_size, task_id, created, now)
            sessions[id].rewards = {
                branch: (reward, metrics) for branch, (reward, metrics) in json.loads(rewards).items()
            }
        for id, row in self.db.read("SELECT session, row FROM turns ORDER BY number"):
            turn = json.loads(row)
            if id not in sessions or (turn["parent"] and turn["parent"] not in sessions[id].turns):
                _log.warning("turn %s of session %s is left out: the turn before it was not stored", turn["id"], id)
                continue
            sessions[id].add(turn_of(turn, sessions[id]))
        return list(sessions.values())

    # --- writes that callers wait for

    def answered(self, once: RequestKey | None) -> Any:
        """Return the earlier reply to the key, or None. KeyReused if that request had another body."""
        if once is None:
            return None
        rows = self.db.read("SELECT digest, reply FROM answers WHERE key=? AND until > ?", (once.key, time.time()))
        if not rows:
            return None
        if rows[0][0] != once.digest:
            raise KeyReused(f"the idempotency key '{once.key:.80}' was used for another request; use a new key")
        return json.loads(rows[0][1])

    async def answered_open(self, session: Session, once: RequestKey | None, reply: Mapping[str, Any]) -> None:
        """Write the session and the reply in one transaction."""

        def change(db: sqlite3.Connection) -> None:
            _open(db, session)
            _remember(db, once, reply)

        await self.db.write(change)

    async def answer(self, once: RequestKey | None, reply: Mapping[str, Any]) -> None:
        """Write the reply; return once it and all earlier writes are on disk."""
        await self.db.write(lambda db: _remember(db, once, reply))

    async def rewarded(
        self, session: Session, rewards: Mapping[str, tuple[float, Mapping[str, float]]], once: RequestKey | None,
        reply: Mapping[str, Any],
    ) -> None:  # fmt: skip
        def change(db: sqlite3.Connection) -> None:
            db.execute("UPDATE sessions SET rewards=? WHERE id=?", (json.dumps(rewards), session.id))
            _remember(db, once, reply)

        await self.db.write(change)

    async def finished(
        self,
        session: Session,
        made: Sequence[tuple[str, Trajectory]],
        once: RequestKey | None,
        reply: Mapping[str, Any],
    ) -> None:
        """Replace a session by its trajectories."""
        rows = [{**trajectory_row(each), "extra": _origin(session, branch)} for branch, each in made]

        def change(db: sqlite3.Connection) -> None:
            _forget(db, session)
            values = (session.id, session.group, session.group_size, json.dumps(rows), "")
            db.execute("INSERT INTO finished VALUES (?,?,?,?,?)", values)
            _remember(db, once, reply)

        await self.db.write(change)

    # --- groups

    async def finished_groups(self) -> list[FinishedGroup]:
        """Return the complete groups. Each keeps its name until it is delivered."""
        return await self.db.write(_finished_groups)

    async def delivered(self, group: FinishedGroup) -> None:
        await self.db.write(lambda db: db.execute("DELETE FROM finished WHERE leaves_as=?", (group.name,)))

    async def set_aside(self, group: FinishedGroup, reason: str) -> None:
        """Keep a refused group with the reason, and deliver it no more."""

        def change(db: sqlite3.Connection) -> None:
            values = (group.name, group.group, reason, json.dumps(group.rows), time.time())
            db.execute("INSERT OR REPLACE INTO refused VALUES (?,?,?,?,?)", values)
            db.execute("DELETE FROM finished WHERE leaves_as=?", (group.name,))

        await self.db.write(change)

    def refused(self, last: int) -> list[dict[str, Any]]:
        """Return the groups that were set aside, newest first."""
        asked = "SELECT name, group_id, reason, at FROM refused ORDER BY at DESC LIMIT ?"
        return [dict(zip(("name", "group", "reason", "at"), row, strict=True)) for row in self.db.read(asked, (last,))]

    @property
    def num_refused(self) -> int:
        return self.db.read("SELECT count(*) FROM refused")[0][0]

    async def tidy(self) -> None:
        await self.db.write(lambda db: db.execute("DELETE FROM answers WHERE until < ?", (time.time(),)))

    @property
    def num_undelivered(self) -> int:
        """Number of finished sessions that are not delivered."""
        return self.db.read("SELECT count(*) FROM finished")[0][0]


def _origin(session: Session, branch: str) -> dict[str, Any]:
    group = {"group": session.group} if session.group else {}
    return {"session": session.id, "branch": branch, **group}


# --- changes


def _open(db: sqlite3.Connection, session: Session) -> None:
    values = (session.id, int(session.automatic), session.group, session.group_size, session.task_id, session.created)
    db.execute("INSERT OR REPLACE INTO sessions VALUES (?,?,?,?,?,?,'{}')", values)


def _forget(db: sqlite3.Connection, session: Session) -> None:
    db.execute("DELETE FROM sessions WHERE id=?", (session.id,))
    db.execute("DELETE FROM turns WHERE session=?", (session.id,))


def _drop(db: sqlite3.Connection, session: Session) -> None:
    """Drop a session; count it as finished and empty, so that its group does not wait for it."""
    _forget(db, session)
    if session.group_size:
        values = (session.id, session.group, session.group_size)
        db.execute("INSERT OR REPLACE INTO finished VALUES (?,?,?,'[]','')", values)


def _remember(db: sqlite3.Connection, once: RequestKey | None, reply: Mapping[str, Any]) -> None:
    if once is not None:
        values = (once.key, once.digest, json.dumps(reply), time.time() + _KEPT_S)
        db.execute("INSERT OR REPLACE INTO answers VALUES (?,?,?,?)", values)


def _finished_groups(db: sqlite3.Connection) -> list[FinishedGroup]:
    """Name the complete groups and return them. A session without a group is a group by itself. A group without a size
    is complete once none of its sessions is open."""
    db.execute("UPDATE finished SET leaves_as = session WHERE group_id = '' AND leaves_as = ''")
    open_groups = {group for (group,) in db.execute("SELECT DISTINCT group_id FROM sessions")}
    waiting = db.execute(
        "SELECT group_id, count(*), max(group_size), max(session) FROM finished WHERE leaves_as = '' GROUP BY group_id"
    ).fetchall()
    for group, count, size, name in waiting:
        if count >= size if size else group not in open_groups:
            db.execute("UPDATE finished SET leaves_as = ? WHERE group_id = ? AND leaves_as = ''", (name, group))
    groups: dict[str, FinishedGroup] = {}
    columns = "SELECT leaves_as, group_id, rows FROM finished WHERE leaves_as != '' ORDER BY rowid"
    for name, group, rows in db.execute(columns):
        groups.setdefault(name, FinishedGroup(name, group, [])).rows.extend(json.loads(rows))
    return list(groups.values())
