"""The durable store: one fsync for many changes, failed changes, full and broken disks, one owner, kill -9."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import StoreBroken, StoreError, StoreFull, StoreOwned
from tandem.io.append_only_segments import SegmentPlace, Segments
from tandem.io.sqlite_store import Durable

SCHEMA = ("CREATE TABLE rows (id INTEGER PRIMARY KEY, text TEXT)",)


def add(number: int, text: str = "") -> Any:
    return lambda db: db.execute("INSERT INTO rows VALUES (?, ?)", (number, text)).lastrowid


def ids(store: Durable) -> list[int]:
    return [number for (number,) in store.read("SELECT id FROM rows ORDER BY id")]


class Watched:
    """Files that count fsyncs, and may fail one."""

    def __init__(self) -> None:
        self.syncs, self.error, self.cut = 0, None, 0

    def mark(self) -> int:
        return 0

    def sync(self) -> None:
        self.syncs += 1
        if self.error:
            raise self.error

    def cut_back(self, _: Any) -> None:
        self.cut += 1

    def sweep(self) -> None:
        pass


def test_changes_share_an_fsync_and_each_gets_its_own_result(tmp_path: Path):
    files = Watched()
    store = Durable(tmp_path, SCHEMA, files=files)

    async def many() -> list[int]:
        return await asyncio.gather(*(store.write(add(number)) for number in range(1, 201)))

    assert asyncio.run(many()) == list(range(1, 201))
    assert files.syncs < 20
    store.close()
    again = Durable(tmp_path, SCHEMA)
    assert len(ids(again)) == 200
    again.close()


def test_a_change_that_fails_undoes_itself_and_no_other(tmp_path: Path):
    store = Durable(tmp_path, SCHEMA)

    def half(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO rows VALUES (50, 'half')")
        raise KeyError("mine")

    async def together() -> list[Any]:
        return await asyncio.gather(store.write(add(1)), store.write(half), store.write(add(2)), return_exceptions=True)

    first, failed, second = asyncio.run(together())
    assert (first, second, type(failed)) == (1, 2, KeyError)
    assert ids(store) == [1, 2]
    store.close()


def test_a_second_owner_is_refused_with_the_first_one_s_process(tmp_path: Path):
    store = Durable(tmp_path, SCHEMA)
    with pytest.raises(StoreOwned, match=f"process {os.getpid()}"):
        Durable(tmp_path, SCHEMA)
    store.close()
    Durable(tmp_path, SCHEMA).close()


def test_an_older_schema_is_brought_forward_and_a_newer_one_refused(tmp_path: Path):
    store = Durable(tmp_path, SCHEMA)
    asyncio.run(store.write(add(1)))
    store.close()
    newer = (*SCHEMA, "ALTER TABLE rows ADD COLUMN more TEXT DEFAULT 'x'")
    store = Durable(tmp_path, newer)
    assert store.read("SELECT more FROM rows") == [("x",)]
    store.close()
    with pytest.raises(StoreError, match="schema version 2, and this Tandem knows 1"):
        Durable(tmp_path, SCHEMA)
    Durable(tmp_path, newer).close()  # and what refused it let go of it


def test_a_failed_fsync_acknowledges_nothing_more_and_a_restart_has_what_was_acknowledged(tmp_path: Path):
    files = Watched()
    store = Durable(tmp_path, SCHEMA, files=files)
    asyncio.run(store.write(add(1)))
    files.error = OSError(errno.EIO, "input/output error")
    with pytest.raises(StoreBroken, match="repair the disk"):
        asyncio.run(store.write(add(2)))
    files.error = None
    with pytest.raises(StoreBroken):
        asyncio.run(store.write(add(3)))
    assert "input/output" in store.broken
    store.close()
    again = Durable(tmp_path, SCHEMA)
    assert ids(again) == [1]
    again.close()


def test_a_full_disk_refuses_and_the_store_goes_on_when_there_is_room(tmp_path: Path):
    """The index itself is out of room: SQLite says so by its own limit on pages."""
    store = Durable(tmp_path, SCHEMA)
    asyncio.run(store.write(lambda db: db.execute("PRAGMA max_page_count=8").fetchall()))
    with pytest.raises(StoreFull, match="nothing was stored"):
        asyncio.run(store.write(add(1, "x" * 100_000)))
    asyncio.run(store.write(add(2)))
    assert ids(store) == [2]
    assert store.broken == ""
    store.close()


def test_what_is_read_is_what_is_committed(tmp_path: Path):
    store = Durable(tmp_path, SCHEMA)
    seen: list[list[int]] = []

    def look(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO rows VALUES (1, '')")
        seen.append(ids(store))

    asyncio.run(store.write(look))
    assert seen == [[]]
    assert ids(store) == [1]
    store.close()


WRITER = """
import asyncio, sys
from pathlib import Path
from tandem.io.sqlite_store import Durable
from tandem.io.append_only_segments import Segments

async def main():
    files = Segments(Path(sys.argv[1]) / "segments", reserve_bytes=0, roll_bytes=20000)
    store = Durable(Path(sys.argv[1]), ("CREATE TABLE rows (id INTEGER PRIMARY KEY, a, b, c, d)",), files=files)
    found = store.read("SELECT max(id) FROM rows")[0][0] or 0

    def one(number):
        def change(db):
            place = files.append(str(number).encode() * 300)
            row = (number, place.segment, place.offset, place.length, place.crc)
            db.execute("INSERT INTO rows VALUES (?,?,?,?,?)", row)
            return number
        return change

    async def lane(lane):
        number = found + 1 + lane
        while True:
            await store.write(one(number))
            print(number, flush=True)
            number += 4

    await asyncio.gather(*(lane(each) for each in range(4)))

asyncio.run(main())
"""


def test_nothing_acknowledged_is_lost_when_the_process_is_killed_at_any_instant(tmp_path: Path):
    acknowledged: set[int] = set()
    for after in (1, 7, 30, 31, 60):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(after):
                acknowledged.add(int(writer.stdout.readline()))
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split(b"\n")[:-1]
            acknowledged.update(int(line) for line in rest)
    files = Segments(tmp_path / "segments")
    store = Durable(tmp_path, ("",), files=files)
    rows = {row[0]: SegmentPlace(*row[1:]) for row in store.read("SELECT * FROM rows")}
    assert len(acknowledged) > 100
    assert acknowledged <= rows.keys()
    files.keep_only(rows.values())
    for number, place in rows.items():
        assert files.read(place) == str(number).encode() * 300
    store.close()
    files.close()
