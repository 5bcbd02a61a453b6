"""SQL on SQLite: the model writes a query, SQLite runs it, and the rows are compared with those of the right query."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

WORDS = {"largest": "max", "smallest": "min", "total": "sum", "mean": "avg"}
TABLES, COLUMNS = "stuvwxyz", "abcdefghijklmnopqr"
HELD_OUT = 128


@dataclass(frozen=True)
class Sql:
    """`smallest a of x` is answered by `select min(a) from x`. Held out: word, column and table, asked together."""

    demo_right: float = 0.4
    """Share of demonstrations with the right aggregate; the others always take the sum."""
    prompt: str = "{question}"
    """For a chat model: `Tables s to z have columns a to r. Answer with one SQLite query: {question}.`"""

    def tasks(self, split: str) -> Sequence[Task]:
        asked = [(word, column, table) for word in WORDS for column in COLUMNS for table in TABLES]
        random.Random(0).shuffle(asked)
        return [self._task(*each) for each in (asked[:HELD_OUT] if split == "eval" else asked[HELD_OUT:])]

    def _task(self, word: str, column: str, table: str) -> Task:
        question = f"{word} {column} of {table}"
        payload = {"query": f"select {WORDS[word]}({column}) from {table}", "sum": f"select sum({column}) from {table}"}
        return Task(question, ({"role": "user", "content": self.prompt.replace("{question}", question)},), payload)

    async def run(self, task: Task, chat: Chat) -> Outcome:
        reply = await chat.reply()
        rows = answer(reply.text.strip())
        correct = float(rows is not None and rows == answer(task.payload["query"]))
        return Outcome(correct, {"correct": correct, "ran": float(rows is not None)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """What a model from scratch imitates first. Rewards alone tell it which query is right."""
        return [{"role": "assistant", "content": task.payload["query" if rng.random() < self.demo_right else "sum"]}]


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
