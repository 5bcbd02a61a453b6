"""Keep chats and what their users thought of the answers, and read rows to train on: a SQLite store in `feedback/` of a
service's data directory.

consumes: finished chats, and ratings by a chat's id      waits for: the disk
produces: pairs, labelled answers, demonstrations         while the service goes on, too
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tandem.errors import RunError
from tandem.io.jsonl import to_line
from tandem.io.sqlite_store import Durable, read_only
from tandem.types import Message

_log = logging.getLogger(__name__)

PLACE = "feedback"
MAX_BYTES = 2**30
_GOOD_FROM = 0.5  # a thumb is 1 or 0
_SCHEMA = (
    """CREATE TABLE chats (id TEXT PRIMARY KEY, at REAL, version INTEGER, answers INTEGER, rated INTEGER DEFAULT 0,
                           size INTEGER, chat BLOB);
       CREATE INDEX chats_by_rated ON chats (rated);
       CREATE TABLE ratings (chat TEXT, answer INTEGER, at REAL, value REAL, better TEXT,
                             PRIMARY KEY (chat, answer))""",
)
_ROW_BYTES = 256  # of the rows and indexes of a chat

Kind: TypeAlias = Literal["pairs", "labels", "sft"]
"""pairs: prompt, chosen and rejected; labels: prompt, completion and a label; sft: demonstrations."""


class ChatStore:
    """The chats of one service. Unrated chats are deleted, the oldest first, when all together exceed `max_bytes`."""

    def __init__(self, data_dir: Path, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._store, self._said_full = Durable(data_dir / PLACE, _SCHEMA), False
        self._bytes = int(self._store.read("SELECT coalesce(sum(size), 0) FROM chats")[0][0])

    async def keep(
        self, id: str, messages: Sequence[Message], answers: Sequence[Message], version: int, *, tools: bool = False
    ) -> None:
        """Write a chat with all its answers; return once it is on the disk."""
        chat = {"messages": [*messages], "answers": [*answers], "tools": tools}
        packed = zlib.compress(json.dumps(chat, ensure_ascii=False).encode("utf-8", "backslashreplace"))
        await self._store.write(lambda db: self._insert(db, id, version, len(answers), packed))

    async def rate(self, id: str, answer: int, value: float, better: str) -> tuple[int, int] | None:
        """Write a rating, in place of an earlier one of the same answer. Return how many answers the chat has, and the
        version that gave them; None for an unknown chat. Nothing is written if there is no such answer."""
        return await self._store.write(lambda db: _rate(db, id, answer, value, better))

    def close(self) -> None:
        self._store.close()

    # --- on the store's thread

    def _insert(self, db: sqlite3.Connection, id: str, version: int, answers: int, packed: bytes) -> None:
        size = len(packed) + _ROW_BYTES
        db.execute(
            "INSERT INTO chats (id, at, version, answers, size, chat) VALUES (?, ?, ?, ?, ?, ?)",
            (id, time.time(), version, answers, size, packed),
        )
        self._bytes += size
        while self._bytes > self.max_bytes and (
            oldest := db.execute("SELECT id, size FROM chats WHERE rated = 0 ORDER BY rowid LIMIT 1").fetchone()
        ):
            db.execute("DELETE FROM chats WHERE id = ?", oldest[:1])
            self._bytes -= oldest[1]
            if oldest[0] == id and not self._said_full:
                self._said_full = True
                _log.warning(
                    "feedback: rated chats take %g GiB; new chats are not kept: train on them, and move the directory",
                    self.max_bytes / 2**30,
                )


def _rate(db: sqlite3.Connection, id: str, answer: int, value: float, better: str) -> tuple[int, int] | None:
    found = db.execute("SELECT answers, version FROM chats WHERE id = ?", (id,)).fetchone()
    if found is not None and answer < found[0]:
        db.execute("UPDATE chats SET rated = 1 WHERE id = ?", (id,))
        db.execute("INSERT OR REPLACE INTO ratings VALUES (?, ?, ?, ?, ?)", (id, answer, time.time(), value, better))
    return found


# --- rows to train on


@dataclass(frozen=True)
class _Rated:
    prompt: list[Message]
    answer: Message
    value: float
    better: str
    tools: bool


def feedback_rows(source: str | Path, kind: Kind = "pairs", *, good_from: float | None = None) -> list[dict[str, Any]]:
    """Return rows to train on from the ratings that a service kept.

    `source`: the service's data directory, or the run that was served. An answer is good if its value is at least
    `good_from`; left out, 0.5, which suits thumbs. pairs: a better answer beside the one that was sent, and a good
    beside a bad answer to the same messages. Left out are chats with tools, because a row has no place for tools, and
    empty answers, because there is nothing to train on.
    """
    rated = [each for each in _rated(_place(source)) if not each.tools]
    highest = max((each.value for each in rated), default=0.0)
    if good_from is None and highest > 1:
        raise RunError(f"good_from: ratings go up to {highest:g}; say from which value on an answer is good, such as 4")
    limit = _GOOD_FROM if good_from is None else good_from
    said = [each for each in rated if each.answer.get("content")]
    if kind == "pairs":
        return [*_pairs(said, limit)]
    if kind == "labels":
        return [{"prompt": each.prompt, "completion": [each.answer], "label": each.value >= limit} for each in said] + [
            {"prompt": each.prompt, "completion": _said(each.better), "label": True} for each in rated if each.better
        ]
    shown = [(each, _said(each.better) if each.better else [each.answer]) for each in rated]
    return [
        {"messages": [*each.prompt, *answer]}
        for each, answer in shown
        if each.better or (each.value >= limit and each.answer.get("content"))
    ]


def count_feedback(source: str | Path) -> dict[str, int]:
    """Return how many chats a service kept, how many answers were rated, and how many came with a better answer."""
    with read_only(_place(source)) as db:
        (chats,) = db.execute("SELECT count(*) FROM chats").fetchone()
        rated, better = db.execute("SELECT count(*), coalesce(sum(better != ''), 0) FROM ratings").fetchone()
    return {"chats": chats, "rated": rated, "better": better}


def _place(source: str | Path) -> Path:
    for place in (Path(source) / PLACE, Path(source) / "serve" / PLACE):
        if (place / "index.sqlite3").exists():
            return place
    raise RunError(
        f"{source}: has no feedback/; serve with `tandem serve DIR --feedback` (or `feedback = true` in the spec of "
        "`tandem online serve`), and name DIR or the service's --data-dir"
    )


def _rated(place: Path) -> Iterator[_Rated]:
    """Yield the rated answers, the oldest chat first."""
    with read_only(place) as db:
        for packed, answer, value, better in db.execute(
            "SELECT chat.chat, answer, value, better FROM chats AS chat JOIN ratings ON ratings.chat = chat.id "
            "ORDER BY chat.rowid, answer"
        ):
            chat = json.loads(zlib.decompress(packed))
            yield _Rated(chat["messages"], chat["answers"][answer], value, better, chat["tools"])


def _pairs(rated: Sequence[_Rated], limit: float) -> Iterator[dict[str, Any]]:
    """Yield a pair for each better answer; then pair the good and the bad answers to the same messages, so that each of
    them is in a pair."""
    by_prompt: dict[str, tuple[list[Message], list[Message], list[Message]]] = {}
    for each in rated:
        if each.better and each.better != each.answer.get("content"):
            yield _pair(each.prompt, _said(each.better)[0], each.answer)
        prompt, good, bad = by_prompt.setdefault(json.dumps(each.prompt, sort_keys=True), (each.prompt, [], []))
        if not each.better:
            (good if each.value >= limit else bad).append(each.answer)
    for prompt, good, bad in by_prompt.values():
        if good and bad:
            for chosen, rejected in islice(zip(cycle(good), cycle(bad), strict=False), max(len(good), len(bad))):
                if chosen != rejected:
                    yield _pair(prompt, chosen, rejected)


def _pair(prompt: list[Message], chosen: Message, rejected: Message) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}


def _said(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def write_rows(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write rows as JSON Lines, all or nothing."""
    from tandem.io import atomic_write

    text = "".join(map(to_line, rows))
    atomic_write.write_bytes(file, text.encode("utf-8", "backslashreplace"))
