"""A power cut at any point of what is promised to be durable loses nothing that was acknowledged."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from powercut import Cut, Disk
from tandem.io import atomic_write
from tandem.io.append_only_segments import SegmentPlace, Segments
from tandem.io.jsonl import JsonlWriter, read_jsonl
from tandem.io.sqlite_store import Durable
from tandem.runs.artifacts import ArtifactStore
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.lease import DirectoryLease, begin

SCHEMA = ("CREATE TABLE rows (id INTEGER PRIMARY KEY, segment, offset, length, crc)",)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    root = tmp_path / "disk"
    root.mkdir()
    with closing(Disk(root, monkeypatch)) as disk:
        yield disk
        monkeypatch.undo()


def after_each_cut(disk: Disk, tmp_path: Path, check: Callable[[Path, Cut], None], least: int) -> None:
    """`least`: so many cuts are there to be looked at: a seam that wraps nothing would find nothing."""
    cuts = list(disk.cuts)
    assert len(cuts) >= least
    for number, cut in enumerate(cuts):
        place = cut.lay_out(tmp_path / f"cut-{number}")
        try:
            check(place, cut)
        except Exception as error:
            raise AssertionError(f"cut {number}, {cut.after}, acknowledged {cut.acked}: {sorted(cut.files)}") from error


def newest(acked: list[Any]) -> int:
    return max(acked, default=0)


def test_a_file_that_is_written_whole_is_the_last_that_was_acknowledged_or_the_next(disk: Disk, tmp_path: Path):
    for number in range(1, 4):
        atomic_write.write_text(disk.root / "file", f"{number}" * 5000)
        disk.ack(number)

    def check(place: Path, cut: Cut) -> None:
        found = (place / "file").read_text() if (place / "file").exists() else ""
        there = newest(cut.acked)
        assert found in ({"" if not there else f"{there}" * 5000, f"{there + 1}" * 5000})

    after_each_cut(disk, tmp_path, check, 12)


def test_until_a_file_is_whole_its_name_holds_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A reader in the middle of a write finds the old content, and so does the next process if this one dies."""
    file, found, fsync = tmp_path / "file", list[str](), os.fsync
    atomic_write.write_text(file, "old")

    def looked(descriptor: int) -> None:
        found.append(file.read_text())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", looked)
    atomic_write.write_text(file, "new")
    assert found == ["old", "new"], "before the file is renamed, and before its directory is on the disk"


def test_a_directory_that_is_written_whole_is_there_with_all_that_is_in_it(disk: Disk, tmp_path: Path):
    with atomic_write.directory(disk.root / "export") as directory:
        (directory / "weights").write_bytes(b"w" * 5000)
        (directory / "tokenizer").mkdir()
        (directory / "tokenizer" / "vocabulary").write_text("words")
    disk.ack(1)

    def check(place: Path, cut: Cut) -> None:
        if cut.acked or (place / "export").exists():
            assert (place / "export" / "weights").read_bytes() == b"w" * 5000
            assert (place / "export" / "tokenizer" / "vocabulary").read_text() == "words"

    after_each_cut(disk, tmp_path, check, 8)


def test_of_a_run_its_spec_its_epoch_its_rows_and_its_checkpoints_stay(disk: Disk, tmp_path: Path):
    run = disk.root / "runs" / "run"
    begin(run, "recipe = 'rl'")
    disk.ack("begun")
    lease = DirectoryLease(run)
    rows, checkpoints = JsonlWriter(run / "metrics.jsonl"), Checkpoints(run)
    for version in (1, 2):
        rows.write({"step": version})
        rows.settle()
        checkpoints.write(
            version, lambda directory: (directory / "weights").write_bytes(b"w" * 5000), {"rows": version}
        )
        disk.ack(version)
    rows.close()
    lease.close()

    def check(place: Path, cut: Cut) -> None:
        there = place / "runs" / "run"
        if not cut.acked:
            return
        assert (there / "spec.toml").read_text() == "recipe = 'rl'"
        DirectoryLease(there).close()
        saved = Checkpoints(there)
        found = saved.newest()
        assert saved.set_aside == []
        versions = [each for each in cut.acked if each != "begun"]
        assert (found.version if found else 0) in (newest(versions), newest(versions) + 1)
        if found is not None:
            assert len(read_jsonl(there / "metrics.jsonl")) >= found.state["rows"]

    after_each_cut(disk, tmp_path, check, 30)


def test_an_epoch_is_never_given_twice(disk: Disk, tmp_path: Path):
    for _ in range(3):
        lease = DirectoryLease(disk.root)
        disk.ack(lease.epoch)
        lease.close()

    def check(place: Path, cut: Cut) -> None:
        lease = DirectoryLease(place)
        assert lease.epoch > newest(cut.acked)
        lease.close()

    after_each_cut(disk, tmp_path, check, 10)


@pytest.mark.parametrize("roll_bytes", [2000, 10**6])
def test_what_the_index_points_at_is_in_its_files(disk: Disk, tmp_path: Path, roll_bytes: int):
    """Payloads in files, the index in SQLite: both ways, that all that is acknowledged is there, and that what the
    index holds can be read."""
    home = disk.root / "data"
    files = Segments(home / "segments", roll_bytes=roll_bytes, reserve_bytes=0)
    store = Durable(home, SCHEMA, files=files)

    def add(number: int) -> Callable[[sqlite3.Connection], None]:
        def change(db: sqlite3.Connection) -> None:
            place = files.append(f"{number}".encode() * 700)
            row = (number, place.segment, place.offset, place.length, place.crc)
            db.execute("INSERT INTO rows VALUES (?,?,?,?,?)", row)

        return change

    for number in range(1, 7):
        store.submit(add(number)).result()
        disk.ack(number)
    store.close()
    files.close()

    def check(place: Path, cut: Cut) -> None:
        if not cut.acked:
            return
        files = Segments(place / "data" / "segments", reserve_bytes=0)
        store = Durable(place / "data", SCHEMA, files=files)
        found = {row[0]: SegmentPlace(*row[1:]) for row in store.read("SELECT * FROM rows")}
        assert found.keys() >= set(cut.acked)
        files.keep_only(found.values())
        for number, each in found.items():
            assert files.read(each) == f"{number}".encode() * 700
        store.close()
        files.close()

    after_each_cut(disk, tmp_path, check, 15)


def test_an_artifact_that_was_pushed_can_be_fetched(disk: Disk, tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "inside").mkdir()
    store = ArtifactStore(str(disk.root / "store"))
    for number in (1, 2):
        for name in ("weights", "inside/config"):
            (source / name).write_text(f"{name} {number}" * 50)
        store.push("run", source)
        disk.ack(number)

    def check(place: Path, cut: Cut) -> None:
        there = ArtifactStore(str(place / "store"))
        if cut.acked:
            assert there.find("run").number >= newest(cut.acked)
        if there.names():
            there.fetch("run", place / "back")
            assert (place / "back" / "weights").read_text() == f"weights {there.find('run').number}" * 50

    after_each_cut(disk, tmp_path, check, 10)


def test_every_connection_to_an_index_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made, real = list[sqlite3.Connection](), sqlite3.connect

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        made.append(real(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", connect)
    for _ in range(2):  # made, and found
        store = Durable(tmp_path, SCHEMA)
        for connection in made[-2:]:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        store.close()
    assert len(made) == 4


def test_nothing_else_opens_a_database():
    """So that the test above is about all of them. Maintenance copies and checks the control plane's, which SQLAlchemy
    opens; it commits nothing there."""
    import tandem

    package = Path(tandem.__path__[0])
    opens = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "sqlite3.connect(" in path.read_text()
    }
    assert opens == {"io/sqlite_store.py", "control/maintenance.py"}
