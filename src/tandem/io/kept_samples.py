"""Keep the answers that a run trained on, and search them: a SQLite store in `samples/` of the run.

consumes: the groups of each step      waits for: nothing; a thread of the store compresses and writes them
produces: blocks on the disk           at most 128 samples of one step each

Table `samples` has one row of numbers for each sample. Table `blocks` has the texts, as zlib-compressed JSON, and a bit
map: one bit for the hash of each run of six bytes in the texts. A search reads the bit maps and opens only blocks whose
bit maps have all the runs of the searched text. What is known of each token (token_marks.py) is in a column of its own,
which no search reads.
"""

from __future__ import annotations

import json
import random
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import compress, groupby
from pathlib import Path
from typing import Any

from tandem.errors import RunError
from tandem.io.jsonl import finite
from tandem.io.sqlite_store import Durable, read_only
from tandem.io.token_marks import MarkedToken, Spelling, marks, tokens_of
from tandem.types import Group, Message, Trajectory, text_of

PLACE = "samples"

_SCHEMA = (
    """CREATE TABLE blocks (block INTEGER PRIMARY KEY, step INTEGER, size INTEGER, grams BLOB, texts BLOB);
       CREATE INDEX blocks_by_step ON blocks (step);
       CREATE TABLE samples (id INTEGER PRIMARY KEY, block INTEGER, step INTEGER, version INTEGER, "group" INTEGER,
                             reward REAL, finish TEXT, tokens INTEGER, logprob REAL);
       CREATE INDEX samples_by_block ON samples (block)""",
    "ALTER TABLE blocks ADD COLUMN marks BLOB",
)
_BLOCK_SAMPLES, _BLOCK_CHARACTERS = 128, 2**18
_ROW_BYTES = 64  # of one sample in the table of numbers and its index
_MOST_WAITING = 4  # steps; a slower disk must not fill the memory
_SETTLE_S = 60.0
_LEVEL = 1
_GRAM = 6  # bytes
_BITS = 20
_MOST_BITS, _LEAST_BITS = 2**_BITS, 2**8
_HASH = 0x9E3779B97F4A7C15  # odd, near 2**64 / golden ratio: the upper bits of a product with it are well spread


class KeptSamples:
    """The store of a run in progress. Nothing that fails here ends the run: `tell` gets one sentence instead."""

    def __init__(
        self,
        run_dir: Path,
        *,
        after_step: int,
        share: float,
        max_bytes: int,
        decode: Callable[[Sequence[int]], str],
        tell: Callable[[str], None],
        spell: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Open the store and delete the samples of steps after `after_step`: a resumed run repeats these steps.
        `decode`: the text of token ids, for samples that came without text. `spell`: the same with special tokens, for
        what is known of each token; None: that is not kept."""
        self._share, self._max_bytes, self._decode, self._tell = share, max_bytes, decode, tell
        self._spelling = Spelling(spell) if spell is not None else None
        self._pending: list[Future[None]] = []
        self._said = set[str]()
        self._store = Durable(run_dir / PLACE, _SCHEMA)
        self._bytes = self._store.submit(lambda db: _cut(db, after_step)).result()

    def keep(self, step: int, groups: Sequence[Group]) -> None:
        """Queue the samples of a step. The caller must not change the groups afterwards."""
        self._pending = [each for each in self._pending if not each.done()]
        chosen = [(number, group) for number, group in enumerate(groups) if self._is_chosen(step, number)]
        if len(self._pending) >= _MOST_WAITING:
            self._say("slow", f"samples: those of step {step} are not kept: the disk is slower than the steps")
            return
        if chosen:
            future = self._store.submit(lambda db: self._write(db, step, chosen))
            future.add_done_callback(self._written)
            self._pending.append(future)

    def settle(self) -> None:
        """Wait until the samples of all steps so far are on the disk. A signal handler may call it."""
        wait([self._store.submit(lambda _: None)], _SETTLE_S)

    def close(self) -> None:
        self._store.close()

    def _is_chosen(self, step: int, number: int) -> bool:
        return self._share >= 1 or random.Random(f"{step}:{number}").random() < self._share

    def _written(self, future: Future[None]) -> None:
        if (error := future.exception()) is not None:
            self._say("failed", f"samples: some are not kept: {error}")

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._tell(text)

    # --- on the store's thread

    def _write(self, db: sqlite3.Connection, step: int, groups: Sequence[tuple[int, Group]]) -> None:
        samples = [_sample(number, each, self._decode, self._spelling) for number, group in groups for each in group]
        added = sum(_insert(db, step, block) for block in _blocks(samples))
        removed = 0
        while self._bytes + added - removed > self._max_bytes:
            removed += _delete_oldest(db)
            self._say("full", f"samples: {self._max_bytes / 2**30:g} GiB are used (samples.max_gib); the oldest go")
        self._bytes += added - removed


@dataclass(frozen=True, slots=True)
class _Sample:
    numbers: tuple[Any, ...]
    """version, group, reward, finish, tokens, logprob"""
    task: str
    opening: Sequence[Message]
    turns: Sequence[Message]
    metrics: Mapping[str, float]
    characters: int
    marks: Sequence[Mapping[str, Any]]


def _sample(
    group: int, trajectory: Trajectory, decode: Callable[[Sequence[int]], str], spelling: Spelling | None
) -> _Sample:
    tokens = trajectory.num_trained
    version = min(compress(trajectory.versions, trajectory.trained), default=None)
    mean = sum(compress(trajectory.logprobs, trajectory.trained)) / max(1, tokens)
    finish = "length" if trajectory.status == "truncated" else "stop"
    messages = trajectory.messages
    if not messages:  # of a client that sent only token ids
        first = trajectory.trained.index(True) if tokens else len(trajectory.ids)
        messages = [
            {"role": "user", "content": decode(trajectory.ids[:first])},
            {"role": "assistant", "content": decode(trajectory.ids[first:])},
        ]
    count = next((at for at, each in enumerate(messages) if each.get("role") == "assistant"), len(messages))
    return _Sample(
        (version, group, trajectory.reward, finish, tokens, round(mean, 5)),
        trajectory.task_id,
        messages[:count],
        messages[count:],
        trajectory.metrics,
        sum(len(text_of(each.get("content"))) for each in messages),
        marks(trajectory, messages[count:], spelling) if spelling is not None else (),
    )


def _blocks(samples: Sequence[_Sample]) -> Iterator[list[_Sample]]:
    block, characters = list[_Sample](), 0
    for each in samples:
        if block and (len(block) >= _BLOCK_SAMPLES or characters + each.characters > _BLOCK_CHARACTERS):
            yield block
            block, characters = [], 0
        block.append(each)
        characters += each.characters
    if block:
        yield block


def _insert(db: sqlite3.Connection, step: int, block: Sequence[_Sample]) -> int:
    """Insert a block and its samples; return about how many bytes they take."""
    prompts = [
        {"task": task, "messages": opening, "answers": [[each.metrics, each.turns] for each in siblings]}
        for (task, opening), siblings in groupby(block, key=lambda each: (each.task, each.opening))
    ]
    text = _json(finite(prompts))
    grams, texts = _bit_map(text), _packed(text)
    of_tokens = _packed(_json([each.marks for each in block])) if any(each.marks for each in block) else None
    size = len(grams) + len(texts) + len(of_tokens or b"") + _ROW_BYTES * len(block)
    number = db.execute(
        "INSERT INTO blocks (step, size, grams, texts, marks) VALUES (?, ?, ?, ?, ?)",
        (step, size, grams, texts, of_tokens),
    ).lastrowid
    db.executemany(
        'INSERT INTO samples (block, step, version, "group", reward, finish, tokens, logprob) '
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [(number, step, *each.numbers) for each in block],
    )
    return size


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _packed(text: str) -> bytes:
    return zlib.compress(text.encode("utf-8", "backslashreplace"), _LEVEL)


def _cut(db: sqlite3.Connection, after_step: int) -> int:
    """Delete the samples of later steps; return the size of the rest."""
    db.execute("DELETE FROM samples WHERE block IN (SELECT block FROM blocks WHERE step > ?)", (after_step,))
    db.execute("DELETE FROM blocks WHERE step > ?", (after_step,))
    return int(db.execute("SELECT coalesce(sum(size), 0) FROM blocks").fetchone()[0])


def _delete_oldest(db: sqlite3.Connection) -> int:
    block, size = db.execute("SELECT block, size FROM blocks ORDER BY block LIMIT 1").fetchone()
    db.execute("DELETE FROM samples WHERE block = ?", (block,))
    db.execute("DELETE FROM blocks WHERE block = ?", (block,))
    return int(size)


# --- search


def samples(
    run: str | Path,
    *,
    steps: int | tuple[int, int] | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    grep: str = "",
    limit: int = 0,
) -> list[dict[str, Any]]:
    """Return the training samples that a run kept, the newest first; `pandas.DataFrame` takes the result as it is.

    `steps`: one step, or the first and the last. `grep`: text that the prompt or the answer contains, in upper or lower
    case. `limit`: the most samples to return; 0: all.
    """
    place = Path(run) / PLACE
    if not (place / "index.sqlite3").exists():
        raise RunError(
            f"{run}: has no samples/; runs of recipe 'rl' keep their training samples, unless samples.share = 0"
        )
    first, last = (steps, steps) if isinstance(steps, int) else steps or (None, None)
    limits = (("step >= ?", first), ("step <= ?", last), ("reward >= ?", min_reward), ("reward <= ?", max_reward))
    told = [(condition, value) for condition, value in limits if value is not None]
    where = " AND ".join(condition for condition, _ in told) or "true"
    found: list[dict[str, Any]] = []
    with read_only(place) as db:
        db.execute("BEGIN")  # one state of the store, also while its run goes on
        for row in _matching(db, where, [value for _, value in told], _escaped(grep)):
            if grep.casefold() not in (row["prompt"] + "\0" + row["text"]).casefold():
                continue
            found.append({key: value for key, value in row.items() if key != "text"})
            if len(found) == limit:
                break
    return found


def sample_tokens(run: str | Path, sample: int) -> list[list[MarkedToken]]:
    """Return the sampled tokens of a sample, by its `id`: a list for each turn. Empty where they were not kept."""
    with read_only(Path(run) / PLACE) as db:
        found = db.execute(
            "SELECT texts, marks, (SELECT count(*) FROM samples AS those WHERE those.block = samples.block AND "
            "those.id < samples.id) FROM samples JOIN blocks USING (block) WHERE samples.id = ?",
            (sample,),
        ).fetchone() if _has_marks(db) else None  # fmt: skip
    if found is None or found[1] is None:
        return []
    texts, of_tokens, place = found
    answers = [answer for group in json.loads(zlib.decompress(texts)) for answer in group["answers"]]
    return [tokens_of(each, answers[place][1]) for each in json.loads(zlib.decompress(of_tokens))[place]]


def _has_marks(db: sqlite3.Connection) -> bool:
    """Return whether the store is of a version that keeps them."""
    return any(name == "marks" for _, name, *_ in db.execute("PRAGMA table_info(blocks)"))


def first_and_last_step(run_dir: Path) -> list[int]:
    """Return the first and the last step that a run kept samples of; none without a store."""
    if not (run_dir / PLACE / "index.sqlite3").exists():
        return []
    with read_only(run_dir / PLACE) as db:
        return sorted({step for row in db.execute("SELECT min(step), max(step) FROM blocks") for step in row if step})


def _matching(db: sqlite3.Connection, where: str, values: Sequence[Any], needle: str) -> Iterator[dict[str, Any]]:
    """Yield the samples of all blocks that may contain the needle."""
    wanted = f"SELECT DISTINCT block FROM samples WHERE {where}"
    condition, of = ("", ()) if where == "true" else (f"WHERE block IN ({wanted})", values)
    positions = _positions(needle)
    for block, grams, texts in db.execute(
        f"SELECT block, grams, texts FROM blocks {condition} ORDER BY block DESC", of
    ):
        if not all(_has(grams, position) for position in positions):
            continue
        text = zlib.decompress(texts).decode()
        if needle and needle not in text.casefold():
            continue
        answers = [(group, *answer) for group in json.loads(text) for answer in group["answers"]]
        numbers = db.execute(
            f'SELECT id, step, version, "group", reward, finish, tokens, logprob, ({where}) FROM samples '
            "WHERE block = ? ORDER BY id",
            (*values, block),
        ).fetchall()
        for row, (group, metrics, turns) in reversed(list(zip(numbers, answers, strict=True))):
            if row[-1]:
                yield _as_row(row, group, metrics, turns)


def _as_row(row: Sequence[Any], group: Mapping[str, Any], metrics: Any, turns: Sequence[Message]) -> dict[str, Any]:
    said = [text_of(each.get("content")) for each in turns if each.get("role") == "assistant"]
    names = ("id", "step", "version", "group", "reward", "finish", "tokens", "logprob")
    return {
        **dict(zip(names, row, strict=False)),
        "rewards": metrics,
        "task": group["task"],
        "prompt": "\n".join(text_of(each.get("content")) for each in group["messages"]),
        "answer": said[-1] if said else "",
        "messages": [*group["messages"], *turns],
        "text": "\0".join(text_of(each.get("content")) for each in turns),
    }


def _escaped(text: str) -> str:
    """Return the text as the JSON of a block has it."""
    return json.dumps(text, ensure_ascii=False)[1:-1].casefold()


def _bit_map(text: str) -> bytes:
    """Return the bit map of a text's run of six bytes: at most one bit in four is set."""
    import numpy as np

    content = np.frombuffer(text.casefold().encode("utf-8", "backslashreplace"), np.uint8).astype(np.uint64)
    bits = np.zeros(_MOST_BITS, bool)
    runs = np.zeros(max(0, len(content) - _GRAM + 1), np.uint64)
    for at in range(_GRAM):
        runs = runs << np.uint64(8) | content[at : at + len(runs)]
    bits[(runs * np.uint64(_HASH)) >> np.uint64(64 - _BITS)] = True
    while len(bits) > _LEAST_BITS and 8 * np.count_nonzero(bits) <= len(bits):
        bits = bits[: len(bits) // 2] | bits[len(bits) // 2 :]  # a position's low bits are its place in the half
    return np.packbits(bits).tobytes()


def _positions(needle: str) -> list[int]:
    content = needle.encode("utf-8", "backslashreplace")
    runs = {int.from_bytes(content[at : at + _GRAM], "big") for at in range(len(content) - _GRAM + 1)}
    return [(run * _HASH & (2**64 - 1)) >> (64 - _BITS) for run in sorted(runs)]


def _has(grams: bytes, position: int) -> bool:
    place = position & (8 * len(grams) - 1)
    return bool(grams[place >> 3] & 0x80 >> (place & 7))
