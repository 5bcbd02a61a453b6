"""Payload files: reads return what was written, unused files are removed, and a full disk harms none."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.errors import StoreError, StoreFull
from tandem.io.append_only_segments import Segments
from tandem.io.sqlite_store import Durable


def files(segments: Segments) -> list[str]:
    return sorted(path.name for path in segments.directory.glob("*.seg"))


def test_what_is_read_is_what_was_written_in_several_parts(tmp_path: Path):
    segments = Segments(tmp_path, reserve_bytes=0)
    places = [segments.append(b"head", memoryview(bytes([number]) * number)) for number in range(1, 50)]
    segments.sync()
    assert [segments.read(place) for place in places] == [b"head" + bytes([n]) * n for n in range(1, 50)]
    segments.close()


def test_a_file_goes_when_the_last_payload_in_it_is_forgotten(tmp_path: Path):
    segments = Segments(tmp_path, roll_bytes=100, reserve_bytes=0)
    places = [segments.append(b"x" * 60) for _ in range(6)]
    segments.sync()
    assert files(segments) == ["00000001.seg", "00000002.seg", "00000003.seg"]
    segments.forget(places[:3])
    segments.sweep()
    assert files(segments) == ["00000002.seg", "00000003.seg"]
    assert segments.read(places[3]) == b"x" * 60
    segments.forget(places[3:])
    segments.sweep()
    assert files(segments) == ["00000003.seg"]  # it is being written
    segments.close()


def test_a_file_in_which_all_was_forgotten_may_still_be_written_to(tmp_path: Path):
    segments = Segments(tmp_path, roll_bytes=100, reserve_bytes=0)
    segments.forget([segments.append(b"x" * 20)])
    segments.sweep()
    kept, _ = segments.append(b"y" * 80), segments.append(b"z" * 80)
    segments.sweep()
    assert segments.read(kept) == b"y" * 80
    segments.forget([kept])
    segments.sweep()
    assert files(segments) == ["00000002.seg"]
    segments.close()


def test_a_restart_keeps_what_the_index_points_at_and_never_writes_behind_a_torn_tail(tmp_path: Path):
    segments = Segments(tmp_path, roll_bytes=100, reserve_bytes=0)
    wanted, _ = segments.append(b"a" * 90), segments.append(b"b" * 90)
    segments.close()
    with (tmp_path / "00000001.seg").open("ab") as file:
        file.write(b"torn")
    again = Segments(tmp_path, reserve_bytes=0)
    again.keep_only([wanted])
    assert files(again) == ["00000001.seg"]
    assert again.append(b"c").segment != wanted.segment
    assert again.read(wanted) == b"a" * 90
    again.close()


def test_a_changed_byte_is_found(tmp_path: Path):
    segments = Segments(tmp_path, reserve_bytes=0)
    place = segments.append(b"payload")
    with (tmp_path / "00000001.seg").open("r+b") as file:
        file.seek(place.offset + 2)
        file.write(b"!")
    with pytest.raises(StoreError, match="not what was written"):
        segments.read(place)
    segments.close()


@pytest.mark.parametrize("roll", [100, 10_000])
def test_what_was_cut_back_never_was(tmp_path: Path, roll: int):
    segments = Segments(tmp_path, roll_bytes=roll, reserve_bytes=0)
    kept = segments.append(b"k" * 60)
    mark = segments.mark()
    for _ in range(5):
        segments.append(b"x" * 60)
    segments.cut_back(mark)
    segments.sweep()
    assert files(segments) == ["00000001.seg"]
    after = segments.append(b"y" * 60)
    segments.sync()
    assert (segments.read(kept), segments.read(after)) == (b"k" * 60, b"y" * 60)
    segments.forget([after])
    assert segments.read(kept) == b"k" * 60
    segments.forget([kept, segments.append(b"z" * 10_000)])
    segments.append(b"z")
    segments.sweep()
    assert "00000001.seg" not in files(segments)  # nothing was counted that never was
    segments.close()


def test_a_commit_that_fails_after_a_new_file_began_leaves_nothing_in_the_next_one_s_way(tmp_path: Path):
    segments = Segments(tmp_path / "segments", roll_bytes=1000, reserve_bytes=0)
    store = Durable(tmp_path, ("CREATE TABLE rows (id INTEGER PRIMARY KEY)",), files=segments)
    kept = store.submit(lambda _: segments.append(b"a" * 600)).result()
    whole = segments.sync

    def full() -> None:
        segments.sync = whole
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    segments.sync = full
    two = lambda _: [segments.append(b"b" * 600), segments.append(b"c" * 600)]  # noqa: E731
    with pytest.raises(StoreFull):
        store.submit(two).result()
    assert files(segments) == ["00000001.seg"]
    places = store.submit(two).result()
    assert [segments.read(place)[:1] for place in (kept, *places)] == [b"a", b"b", b"c"]
    assert store.broken == ""
    store.close()
    segments.close()


def test_of_two_changes_at_once_one_that_raised_after_a_new_file_began_harms_the_other_in_nothing(tmp_path: Path):
    segments = Segments(tmp_path / "segments", roll_bytes=1000, reserve_bytes=0)
    store = Durable(tmp_path, ("CREATE TABLE rows (id INTEGER PRIMARY KEY)",), files=segments)
    kept = store.submit(lambda _: segments.append(b"a" * 600)).result()
    began, go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        began.set()
        assert go.wait(10)

    def raises(_: object) -> None:
        segments.append(b"b" * 600)
        segments.append(b"c" * 600)
        raise StoreFull("no room for the third")

    holding = store.submit(hold)  # so that the two behind it share a transaction
    assert began.wait(10)
    first = store.submit(raises)
    second = store.submit(lambda _: [segments.append(b"d" * 600), segments.append(b"e" * 600)])
    go.set()
    holding.result()
    with pytest.raises(StoreFull, match="third"):
        first.result()
    assert [segments.read(place)[:1] for place in (kept, *second.result())] == [b"a", b"d", b"e"]
    assert store.broken == ""
    store.close()
    segments.close()


def test_what_is_left_free_is_not_written_to(tmp_path: Path):
    segments = Segments(tmp_path, reserve_bytes=2**60)
    with pytest.raises(StoreFull, match="stay free"):
        segments.append(b"x")
    segments.close()


def test_a_write_that_stops_halfway_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    segments = Segments(tmp_path, reserve_bytes=0)
    before = segments.append(b"before")
    whole = os.pwrite

    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    def half(descriptor: int, parts: list[bytes], offset: int) -> int:
        return whole(descriptor, b"".join(parts)[:7], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", half)
        patch.setattr(os, "pwrite", no_room)
        with pytest.raises(OSError, match="no space"):
            segments.append(b"x" * 100)
    size = (tmp_path / "00000001.seg").stat().st_size
    assert size == before.offset + before.length
    after = segments.append(b"after")
    assert (segments.read(before), segments.read(after)) == (b"before", b"after")
    segments.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)  # a test that failed may hold files there


def fill_to_the_last_byte(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"z" * 4096) == 4096:
            pass


def test_a_disk_that_is_full_refuses_harms_nothing_and_goes_on_when_there_is_room(small_disk: Path):
    """A real file system of 2 MiB, filled twice: by what is stored, and by somebody else."""
    segments = Segments(small_disk / "segments", roll_bytes=200_000, reserve_bytes=300_000)
    store = Durable(small_disk, ("CREATE TABLE rows (id INTEGER PRIMARY KEY)",), files=segments)

    def add(db):
        db.execute("INSERT INTO rows DEFAULT VALUES")
        return segments.append(b"p" * 50_000)

    kept = []

    def fill() -> None:
        while True:
            kept.append(store.submit(add).result())

    with pytest.raises(StoreFull):
        fill()
    assert len(kept) > 10
    ballast = small_disk / "ballast"
    fill_to_the_last_byte(ballast)  # now SQLite has no room either
    errors = set()
    for _ in range(40):
        try:
            store.submit(lambda db: db.execute("INSERT INTO rows VALUES (NULL)").rowcount).result()
        except StoreFull as error:
            errors.add(type(error))
    assert (errors, store.broken) == ({StoreFull}, "")
    ballast.unlink()
    segments.forget(kept[:8])
    store.submit(lambda db: db.execute("DELETE FROM rows WHERE id <= 8").rowcount).result()
    kept = [*kept[8:], store.submit(add).result()]
    assert all(segments.read(place) == b"p" * 50_000 for place in kept)
    store.close()
    segments.close()
    again = Durable(small_disk, ("",))
    assert again.read("PRAGMA integrity_check") == [("ok",)]
    again.close()


def test_a_file_that_goes_while_sizes_are_added_up_is_left_out(tmp_path: Path):
    segments = Segments(tmp_path, reserve_bytes=0)
    segments.append(b"x" * 20)
    segments.sync()
    (tmp_path / "00000099.seg").symlink_to(tmp_path / "gone")
    assert segments.size_bytes == (tmp_path / "00000001.seg").stat().st_size
    segments.close()
