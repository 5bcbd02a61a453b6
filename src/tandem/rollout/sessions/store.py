"""What of a gateway's sessions outlives its process: open ones turn by turn, rewarded ones until they are delivered.

consumes: what Sessions does, rewards      waits for: the disk, where somebody was promised that it is there
produces: groups of trajectories           a group leaves once its sessions have finished; delivered again after a crash
                                           under the same name, so whoever takes it sees it once
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

_KEPT_S = 7 * 86400.0  # how long an idempotency key is remembered

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
class Leaving:
    """A group whose sessions have finished."""

    name: str
    group: str
    rows: list[dict[str, Any]]
    """Trajectories, as the rollout service takes them in JSON."""


Deliver: TypeAlias = Callable[[Leaving], Awaitable[None]]
"""Returns once a group is where it belongs; GroupRefused: nobody ever takes it. The same name twice is one group."""


class SessionStore:
    """What Sessions keeps things by. A turn is written and not waited for: a power cut may cost the last of them, and
    then a conversation goes on from the turn before."""

    def __init__(self, directory: Path) -> None:
        self._db = Durable(directory, _SCHEMA)

    @property
    def broken(self) -> str:
        return self._db.broken

    def close(self) -> None:
        self._db.close()

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
        """Nobody waits for it; a failure is told of in the log."""

        def tell(written: Future[Any]) -> None:
            if not written.cancelled() and (error := written.exception()) is not None:
                _log.error("%s is not on the disk: %s: %s", what, type(error).__name__, error)

        self._db.submit(change).add_done_callback(tell)

    def open_sessions(self, now: float) -> list[Session]:
        """As they were left, but for turns that a full disk kept away, and what went on from those."""
        sessions: dict[str, Session] = {}
        for row in self._db.read("SELECT * FROM sessions ORDER BY created"):
            id, automatic, group, group_size, task_id, created, rewards = row
            sessions[id] = Session(id, bool(automatic), group, group_size, task_id, created, now)
            sessions[id].rewards = {
                branch: (reward, metrics) for branch, (reward, metrics) in json.loads(rewards).items()
            }
        for id, row in self._db.read("SELECT session, row FROM turns ORDER BY number"):
            turn = json.loads(row)
            if id not in sessions or (turn["parent"] and turn["parent"] not in sessions[id].turns):
                _log.warning("turn %s of session %s is left out: what it goes on from is not there", turn["id"], id)
                continue
            sessions[id].add(turn_of(turn, sessions[id]))
        return list(sessions.values())

    # --- writes that somebody waits for

    def answered(self, once: RequestKey | None) -> Any:
        """The reply that the key was given before, or None."""
        if once is None:
            return None
        rows = self._db.read("SELECT digest, reply FROM answers WHERE key=? AND until > ?", (once.key, time.time()))
        if not rows:
            return None
        if rows[0][0] != once.digest:
            raise KeyReused(f"the idempotency key '{once.key:.80}' was used for another request; take a new key")
        return json.loads(rows[0][1])

    async def answered_open(self, session: Session, once: RequestKey | None, reply: Mapping[str, Any]) -> None:
        """The session and the reply are on the disk, both or none."""

        def change(db: sqlite3.Connection) -> None:
            _open(db, session)
            _remember(db, once, reply)

        await self._db.write(change)

    async def answer(self, once: RequestKey | None, reply: Mapping[str, Any]) -> None:
        """All that was written before is on the disk, and so is the reply."""
        await self._db.write(lambda db: _remember(db, once, reply))

    async def rewarded(
        self, session: Session, rewards: Mapping[str, tuple[float, Mapping[str, float]]], once: RequestKey | None,
        reply: Mapping[str, Any],
    ) -> None:  # fmt: skip
        def change(db: sqlite3.Connection) -> None:
            db.execute("UPDATE sessions SET rewards=? WHERE id=?", (json.dumps(rewards), session.id))
            _remember(db, once, reply)

        await self._db.write(change)

    async def finished(
        self,
        session: Session,
        made: Sequence[tuple[str, Trajectory]],
        once: RequestKey | None,
        reply: Mapping[str, Any],
    ) -> None:
        """Its trajectories take its place."""
        rows = [{**trajectory_row(each), "extra": _origin(session, branch)} for branch, each in made]

        def change(db: sqlite3.Connection) -> None:
            _forget(db, session)
            values = (session.id, session.group, session.group_size, json.dumps(rows), "")
            db.execute("INSERT INTO finished VALUES (?,?,?,?,?)", values)
            _remember(db, once, reply)

        await self._db.write(change)

    # --- groups

    async def leaving(self) -> list[Leaving]:
        """Groups that are complete; each keeps its name until it is gone."""
        return await self._db.write(_leaving)

    async def gone(self, group: Leaving) -> None:
        await self._db.write(lambda db: db.execute("DELETE FROM finished WHERE leaves_as=?", (group.name,)))

    async def set_aside(self, group: Leaving, reason: str) -> None:
        """Nobody takes it as it is: it is kept with the reason, and is not delivered any more."""

        def change(db: sqlite3.Connection) -> None:
            values = (group.name, group.group, reason, json.dumps(group.rows), time.time())
            db.execute("INSERT OR REPLACE INTO refused VALUES (?,?,?,?,?)", values)
            db.execute("DELETE FROM finished WHERE leaves_as=?", (group.name,))

        await self._db.write(change)

    def refused(self, last: int) -> list[dict[str, Any]]:
        """Groups that were set aside, newest first."""
        asked = "SELECT name, group_id, reason, at FROM refused ORDER BY at DESC LIMIT ?"
        return [dict(zip(("name", "group", "reason", "at"), row, strict=True)) for row in self._db.read(asked, (last,))]

    @property
    def num_refused(self) -> int:
        return self._db.read("SELECT count(*) FROM refused")[0][0]

    async def tidy(self) -> None:
        await self._db.write(lambda db: db.execute("DELETE FROM answers WHERE until < ?", (time.time(),)))

    @property
    def waiting(self) -> int:
        """Finished sessions that are not delivered."""
        return self._db.read("SELECT count(*) FROM finished")[0][0]


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
    """A group that was to be so large does not wait for it any more."""
    _forget(db, session)
    if session.group_size:
        values = (session.id, session.group, session.group_size)
        db.execute("INSERT OR REPLACE INTO finished VALUES (?,?,?,'[]','')", values)


def _remember(db: sqlite3.Connection, once: RequestKey | None, reply: Mapping[str, Any]) -> None:
    if once is not None:
        values = (once.key, once.digest, json.dumps(reply), time.time() + _KEPT_S)
        db.execute("INSERT OR REPLACE INTO answers VALUES (?,?,?,?)", values)


def _leaving(db: sqlite3.Connection) -> list[Leaving]:
    """A session without a group is one of its own. A group without a size is complete when none of it is open."""
    db.execute("UPDATE finished SET leaves_as = session WHERE group_id = '' AND leaves_as = ''")
    open_groups = {group for (group,) in db.execute("SELECT DISTINCT group_id FROM sessions")}
    waiting = db.execute(
        "SELECT group_id, count(*), max(group_size), max(session) FROM finished WHERE leaves_as = '' GROUP BY group_id"
    ).fetchall()
    for group, count, size, name in waiting:
        if count >= size if size else group not in open_groups:
            db.execute("UPDATE finished SET leaves_as = ? WHERE group_id = ? AND leaves_as = ''", (name, group))
    groups: dict[str, Leaving] = {}
    columns = "SELECT leaves_as, group_id, rows FROM finished WHERE leaves_as != '' ORDER BY rowid"
    for name, group, rows in db.execute(columns):
        groups.setdefault(name, Leaving(name, group, [])).rows.extend(json.loads(rows))
    return list(groups.values())
