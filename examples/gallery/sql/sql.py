"""SQL on SQLite: the model writes a query, SQLite runs it, and the rows are compared with those of the right query."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

WORDS = {"largest": "max", "smallest": "min", "total": "sum", "mean": "avg"}
TABLES, COLUMNS = "xyz", "abcdefgh"


class Sql:
    """One question in four is held out: a known word, column and table that were never asked together."""

    def tasks(self, split: str) -> Sequence[Task]:
        asked = [(word, column, table) for word in WORDS for column in COLUMNS for table in TABLES]
        random.Random(0).shuffle(asked)
        chosen = asked[:24] if split == "eval" else asked[24:]
        return [
            Task(
                f"{word} {column} {table}",
                ({"role": "user", "content": f"{word} {column} of {table}"},),
                {"query": f"select {WORDS[word]}({column}) from {table}"},
            )
            for word, column, table in chosen
        ]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        reply = await chat.reply()
        rows = answer(reply.text.strip())
        correct = float(rows is not None and rows == answer(task.payload["query"]))
        return Outcome(correct, {"correct": correct, "ran": float(rows is not None)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """What a model from scratch imitates first: always the right query."""
        return [{"role": "assistant", "content": task.payload["query"]}]


def allowed(action: int, _: str | None, name: str | None, *__: object) -> int:
    reads = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
    counts = action == sqlite3.SQLITE_FUNCTION and name in WORDS.values()
    return sqlite3.SQLITE_OK if reads or counts else sqlite3.SQLITE_DENY


def answer(query: str) -> list[tuple[object, ...]] | None:
    """The query's rows, or None if SQLite refuses it. It may read these tables and aggregate, in few steps."""
    database = sqlite3.connect(":memory:")
    rng = random.Random(7)
    for table in TABLES:
        database.execute(f"create table {table} ({', '.join(COLUMNS)})")
        rows = [[rng.randrange(10**6) for _ in COLUMNS] for _ in range(5)]
        database.executemany(f"insert into {table} values ({', '.join('?' * len(COLUMNS))})", rows)
    database.set_authorizer(allowed)
    database.set_progress_handler(lambda: 1, 10_000)
    try:
        return database.execute(query).fetchmany(100)
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return None
    finally:
        database.close()
