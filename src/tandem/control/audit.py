"""The audit log: who did what, in rows that are never changed.

Each row has a MAC over itself and the MAC before it, with a key of the data directory. So who can write the database
alone can neither change a row, nor take one out, nor change their order, without its being found. Rows at the end could
be taken out together: therefore the server writes the newest row's number and MAC into a file of the data directory,
every few seconds and when it ends. The rows of a write are in its own transaction.

Commands that maintain a data directory leave a note there, which the server takes into the log: the database has one
writer.
"""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tandem.control.ids import new_id
from tandem.control.store import Store
from tandem.control.tables import AuditRow
from tandem.io import atomic_write
from tandem.io.bounded_json import read_json

_log = logging.getLogger(__name__)

HEAD_FILE, _NOTES = "audit-head.json", "audit-notes"
EVERY_S = 2.0
_NO_HEAD = -1


@dataclass(frozen=True, slots=True)
class Verified:
    """What a look at the whole log found. `problem`: empty if all is as it was written."""

    rows: int
    problem: str


class AuditLog:
    """`secret`: of the data directory, where the file of the newest row is."""

    def __init__(self, secret: bytes, data_dir: Path) -> None:
        self._key = hmac.new(secret, b"audit", hashlib.sha256).digest()
        self._data_dir = data_dir
        self._kept = _NO_HEAD

    def add(
        self, session: Session, now: int, *, org: str, actor: str, action: str, item: str, told: Mapping[str, Any]
    ) -> None:
        """Write a row into the transaction of what it tells of. `item`: the id of what was made or changed; `told`:
        what is known of it. What is empty or 0 is left out."""
        known = {name: value for name, value in told.items() if value not in ("", 0, None, [], {}, False)}
        row = AuditRow(
            n=1, at=now, org=org, actor=actor, action=action, item=item,
            told=json.dumps(known, sort_keys=True, separators=(",", ":")),
        )  # fmt: skip
        before = ""
        if (last := _last(session)) is not None:
            row.n, before = last.n + 1, last.mac
        row.mac = self._mac(row, before)
        session.add(row)
        session.flush()

    def verify(self, session: Session) -> Verified:
        """Read the whole log; say which row is not as it was written."""
        head = self._head()  # before the rows: a server that runs goes on writing
        before, count = "", 0
        asked = sa.select(AuditRow).order_by(AuditRow.n).execution_options(yield_per=1000)
        with session.scalars(asked) as rows:
            for row in rows:
                if row.n != count + 1:
                    return Verified(count, f"row {count + 1} is missing")
                if not hmac.compare_digest(row.mac, self._mac(row, before)):
                    return Verified(count, f"row {row.n} is not as it was written, or not in its place")
                before, count = row.mac, row.n
        return Verified(count, head if isinstance(head, str) else _against(session, count, *head))

    async def keep(self, store: Store) -> None:
        """Take notes of maintenance into the log, and write down the newest row."""
        for path in sorted((self._data_dir / _NOTES).glob("*.json")):
            note = _note(path)
            if note is None:
                path.rename(path.with_suffix(".damaged"))
                continue
            await store.write(lambda session, note=note: self._take(session, note))
            path.unlink()
        last = await store.read(_last)
        number, mac = (0, "") if last is None else (last.n, last.mac)
        if number != self._kept:
            await asyncio.to_thread(atomic_write.write_json, self._data_dir / HEAD_FILE, {"n": number, "mac": mac})
            self._kept = number

    def _take(self, session: Session, note: Mapping[str, Any]) -> None:
        if session.scalar(sa.select(AuditRow.n).where(AuditRow.item == note["id"])) is None:
            told = cast("dict[str, Any]", note["told"])
            self.add(
                session, int(note["at"]), org="", actor=str(note["actor"]), action=str(note["action"]),
                item=str(note["id"]), told=told,
            )  # fmt: skip

    def _head(self) -> tuple[int, str] | str:
        """Return the number and the MAC that were written down; or what is wrong with their file."""
        path = self._data_dir / HEAD_FILE
        try:
            head = cast("dict[str, Any]", read_json(path))
            return int(head["n"]), str(head["mac"])
        except FileNotFoundError:
            return _NO_HEAD, ""
        except (OSError, ValueError, KeyError, TypeError):
            return f"{path} is damaged"

    def _mac(self, row: AuditRow, before: str) -> str:
        parts = [before, row.n, row.at, row.org, row.actor, row.action, row.item, row.told]
        return hmac.new(self._key, json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def leave_note(data_dir: Path, action: str, **told: object) -> None:
    """Leave a note of maintenance for the log."""
    note = {
        "id": new_id("note"), "at": time.time_ns() // 1_000_000, "actor": f"user {_user()}", "action": action,
        "told": {name: str(value) for name, value in told.items()},
    }  # fmt: skip
    atomic_write.make_directory(data_dir / _NOTES, mode=atomic_write.PRIVATE)
    atomic_write.write_json(data_dir / _NOTES / f"{note['at']}-{note['id']}.json", note)


def audit_rows(session: Session, orgs: Iterable[str], after: int, limit: int) -> list[AuditRow]:
    asked = sa.select(AuditRow).where(AuditRow.org.in_(list(orgs)), AuditRow.n > after)
    return list(session.scalars(asked.order_by(AuditRow.n).limit(limit)))


def _against(session: Session, count: int, number: int, mac: str) -> str:
    if number == _NO_HEAD:  # of a database that no server has opened yet
        return f"{HEAD_FILE} is missing from the data directory; `tandem control serve` writes it" if count else ""
    if not number:
        return ""
    if (row := session.get(AuditRow, number)) is None:
        return f"rows {count + 1} to {number} are missing"
    return "" if hmac.compare_digest(row.mac, mac) else f"row {number} is another than the one that was kept"


def _last(session: Session) -> AuditRow | None:
    return session.scalar(sa.select(AuditRow).order_by(AuditRow.n.desc()).limit(1))


def _note(path: Path) -> dict[str, Any] | None:
    try:
        return cast("dict[str, Any]", read_json(path))
    except (OSError, ValueError) as error:
        _log.error("%s: is no note for the audit log: %s", path, error)
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
