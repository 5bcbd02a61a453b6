"""The rollout queue's SQLite tables: write changes to them, and read the whole state back."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tandem.errors import KeyReused
from tandem.io.append_only_segments import SegmentPlace
from tandem.io.request_key import RequestKey
from tandem.io.sqlite_store import Durable
from tandem.rollout.queue.state import EnvironmentState, LeaseState, QueueEntry, QueueState
from tandem.rollout.queue.types import RegisteredEnvironment, TrainerSpec

SCHEMA = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE environments (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL, spec TEXT NOT NULL, connected INTEGER NOT NULL
    );
    CREATE TABLE groups (
        id INTEGER PRIMARY KEY AUTOINCREMENT, environment INTEGER NOT NULL, ord INTEGER NOT NULL,
        segment INTEGER, offset INTEGER, length INTEGER, crc INTEGER,
        size INTEGER NOT NULL, tokens INTEGER NOT NULL, oldest INTEGER NOT NULL,
        newest INTEGER NOT NULL, lease INTEGER NOT NULL DEFAULT 0, holds INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX groups_lease ON groups (lease) WHERE lease > 0;
    CREATE TABLE leases (id INTEGER PRIMARY KEY AUTOINCREMENT, version INTEGER NOT NULL);
    CREATE TABLE counts (
        environment INTEGER NOT NULL, what TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (environment, what)
    ) WITHOUT ROWID;
    CREATE TABLE answers (
        key TEXT PRIMARY KEY, digest BLOB NOT NULL, reply BLOB NOT NULL, until REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX answers_until ON answers (until);
    CREATE TABLE quarantine (
        id INTEGER PRIMARY KEY, at REAL NOT NULL, environment INTEGER, field TEXT NOT NULL, reason TEXT NOT NULL,
        body BLOB NOT NULL
    );
    """,
)

Db = sqlite3.Connection

_ACKED = -1  # in place of a lease's version


# --- writing


def set_facts(db: Db, **facts: Any) -> None:
    db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", [(k, json.dumps(v)) for k, v in facts.items()])


def add_groups(db: Db, entries: Iterable[QueueEntry], places: Iterable[SegmentPlace]) -> None:
    db.executemany(
        "INSERT INTO groups VALUES (?,?,?,?,?,?,?,?,?,?,?,0,0)",
        [
            (e.id, e.environment, e.order, p.segment, p.offset, p.length, p.crc, e.size, e.tokens, e.oldest, e.newest)
            for e, p in zip(entries, places, strict=True)
        ],
    )


def add_tickets(db: Db, entries: Iterable[QueueEntry]) -> None:
    rows = [(entry.id, entry.environment, entry.order) for entry in entries]
    db.executemany("INSERT INTO groups VALUES (?,?,?,NULL,NULL,NULL,NULL,0,0,-1,-1,0,0)", rows)


def fill_ticket(db: Db, entry: QueueEntry, place: SegmentPlace) -> None:
    e, p = entry, place
    values = (p.segment, p.offset, p.length, p.crc, e.size, e.tokens, e.oldest, e.newest, e.id)
    columns = "segment=?, offset=?, length=?, crc=?, size=?, tokens=?, oldest=?, newest=?"
    db.execute(f"UPDATE groups SET {columns} WHERE id=?", values)


def remove(db: Db, ids: Iterable[int]) -> None:
    db.executemany("DELETE FROM groups WHERE id=?", [(id,) for id in ids])


def add_lease(db: Db, lease: LeaseState) -> None:
    db.execute("INSERT INTO leases VALUES (?, ?)", (lease.id, lease.version))
    rows = [(lease.id, entry.order, entry.id) for entry in lease.entries]
    db.executemany("UPDATE groups SET lease=?, ord=?, holds=1 WHERE id=?", rows)


def return_leases(db: Db, leases: Iterable[int]) -> None:
    rows = [(lease,) for lease in leases]
    db.executemany("UPDATE groups SET lease=0, holds=0 WHERE lease=?", rows)
    db.executemany(f"DELETE FROM leases WHERE id=? AND version<>{_ACKED}", rows)


def mark_acked(db: Db, leases: Iterable[int]) -> None:
    db.executemany(f"UPDATE leases SET version={_ACKED} WHERE id=?", [(lease,) for lease in leases])


def release_slots(db: Db, ids: Iterable[int]) -> None:
    db.executemany("UPDATE groups SET holds=0 WHERE id=?", [(id,) for id in ids])


def count(db: Db, counted: Mapping[tuple[int, str], int]) -> None:
    db.executemany(
        "INSERT INTO counts VALUES (?,?,?) ON CONFLICT DO UPDATE SET number = number + excluded.number",
        [(environment, what, number) for (environment, what), number in counted.items()],
    )


def add_environment(db: Db, state: EnvironmentState) -> None:
    values = (state.id, state.name, json.dumps(dataclasses.asdict(state.spec)), int(state.connected))
    db.execute("INSERT OR REPLACE INTO environments VALUES (?,?,?,?)", values)


def forget_environments(db: Db, ids: Iterable[int]) -> None:
    """Delete those environments that have no groups left."""
    for id in ids:
        left = db.execute("SELECT EXISTS (SELECT 1 FROM groups WHERE environment=?)", (id,)).fetchone()[0]
        if not left:
            db.execute("DELETE FROM environments WHERE id=?", (id,))
            db.execute("DELETE FROM counts WHERE environment=?", (id,))


def remember(db: Db, once: RequestKey, reply: Any, keep_s: float) -> None:
    until = time.time() + (once.keep_s or keep_s)
    db.execute("INSERT OR REPLACE INTO answers VALUES (?,?,?,?)", (once.key, once.digest, _packed(reply), until))


def add_quarantine(db: Db, environment: int | None, field: str, reason: str, body: bytes, most: int) -> None:
    values = (time.time(), environment, field[:200], reason[:1000], body)
    db.execute("INSERT INTO quarantine (at, environment, field, reason, body) VALUES (?,?,?,?,?)", values)
    db.execute("DELETE FROM quarantine WHERE id <= (SELECT max(id) FROM quarantine) - ?", (most,))


def wipe(db: Db, next_environment: int) -> None:
    """Delete everything except answers. Old answers to registrations name ids below `next_environment`, so they are
    recognised as outdated."""
    for table in ("groups", "leases", "environments", "counts"):
        db.execute(f"DELETE FROM {table}")
    set_facts(db, first_environment=next_environment, next_environment=next_environment)


def forget_answers(db: Db) -> None:
    """Delete some expired answers. Few at a time, so that other writes do not wait long."""
    db.execute("DELETE FROM answers WHERE key IN (SELECT key FROM answers WHERE until < ? LIMIT 2000)", (time.time(),))


# --- reading


def answered(store: Durable, once: RequestKey) -> Any:
    """Return the earlier reply to the key, or None. KeyReused if that request had another body."""
    rows = store.read("SELECT digest, reply FROM answers WHERE key=? AND until > ?", (once.key, time.time()))
    if not rows:
        return None
    digest, reply = rows[0]
    if digest != once.digest:
        raise KeyReused(f"the idempotency key '{once.key}' was used for another request; a new request needs a new key")
    return msgspec.msgpack.decode(reply)


def quarantined(store: Durable, most: int) -> list[dict[str, Any]]:
    rows = store.read(
        "SELECT id, at, environment, field, reason, length(body) FROM quarantine ORDER BY id DESC LIMIT ?", (most,)
    )
    return [dict(zip(("id", "at", "environment", "field", "reason", "bytes"), row, strict=True)) for row in rows]


def read_state(store: Durable, now: float) -> QueueState:
    """Return the state as last committed. Timers restart: a live environment has its full `lapse_s` to call again."""
    state = QueueState()
    facts = {name: json.loads(value) for name, value in store.read("SELECT name, value FROM facts")}
    state.trainer = TrainerSpec(**facts["trainer"]) if facts.get("trainer") else None
    state.epoch, state.version = facts.get("epoch", 0), facts.get("version", 0)
    counts: dict[int, Counter[str]] = {}
    for environment, what, number in store.read("SELECT * FROM counts"):
        counts.setdefault(environment, Counter())[what] = number
    for id, name, spec, connected in store.read("SELECT * FROM environments ORDER BY id"):
        state.environments[id] = EnvironmentState(
            id, name, RegisteredEnvironment(**json.loads(spec)), now, bool(connected)
        )
        state.environments[id].counts = counts.get(id, Counter())
    state.first_environment = facts.get("first_environment", 1)
    used = max([0, *state.environments, *counts])
    state.next_environment = max(facts.get("next_environment", 1), used + 1)
    ids = dict(store.read("SELECT name, seq FROM sqlite_sequence"))
    state.next_id, state.next_lease = ids.get("groups", 0) + 1, ids.get("leases", 0) + 1
    lease_s = state.trainer.lease_s if state.trainer else 0.0
    for id, version in store.read("SELECT id, version FROM leases ORDER BY id"):
        if version == _ACKED:
            state.acked.add(id)
        else:
            state.leases[id] = LeaseState(id, version, [], now + lease_s)
    state.unreleased.extend([None] * facts.get("holding_acked", 0))
    _read_groups(store, state, now)
    state.next_order = max([facts.get("next_order", 1), *(entry.order + 1 for entry in state.entries.values())])
    state.update_shares()
    return state


def _read_groups(store: Durable, state: QueueState, now: float) -> None:
    columns = "id, environment, ord, segment, offset, length, crc, size, tokens, oldest, newest, lease, holds"
    for row in store.read(f"SELECT {columns} FROM groups ORDER BY lease, ord, id"):
        id, environment, order, *place, size, tokens, oldest, newest, lease, holds = row
        entry = QueueEntry(id, environment, order, None, size, tokens, oldest, newest, now)
        entry.place = SegmentPlace(*place) if place[0] is not None else None
        state.entries[id] = entry
        if lease:
            state.leases[lease].entries.append(entry)
            if holds:
                state.unreleased.append(entry)
        elif order < 0:
            state.environments[environment].backlog.append(entry)
            state.in_backlogs += 1
        else:
            state.in_flight[order] = entry
            if entry.place is None:
                state.playing[order] = entry


def places(state: QueueState) -> Sequence[SegmentPlace]:
    return [entry.place for entry in state.entries.values() if entry.place is not None]


def _packed(reply: Any) -> bytes:
    return msgspec.msgpack.encode(reply)
