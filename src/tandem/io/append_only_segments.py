"""Store payloads in append-only files, written and fsynced before the index that points at them commits.

A record is its length, its CRC-32 and its bytes. After a crash, bytes behind the last committed record are never
pointed at. A file is deleted when no payload in it is needed any more.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import StoreError, StoreFull
from tandem.io import atomic_write

_HEAD = struct.Struct("<QI")
ROLL_BYTES = 64 * 2**20
RESERVE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """The place of a payload in the files."""

    segment: int
    offset: int
    length: int
    crc: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in the files, to cut back to."""

    segment: int
    size: int
    written: int


class Segments:
    """The files. One thread writes (`mark`, `append`, `sync`, `cut_back`, `sweep`), any thread reads. `roll_bytes`:
    largest size of a file. `reserve_bytes`: disk space that payloads leave free, so that the index can still shrink the
    queue."""

    def __init__(self, directory: Path, *, roll_bytes: int = ROLL_BYTES, reserve_bytes: int = RESERVE_BYTES) -> None:
        atomic_write.make_directory(directory, mode=atomic_write.PRIVATE)
        self.directory, self.roll_bytes, self.reserve_bytes = directory, roll_bytes, reserve_bytes
        self._lock = threading.Lock()
        self._open: dict[int, _File] = {}
        self._wanted: Counter[int] = Counter()
        self._dead: set[int] = set()
        self._dirty: set[int] = set()
        self._named = False
        """Whether a new file's name is not on the disk yet."""
        present = [int(path.stem) for path in directory.glob("*.seg")]
        self._current, self._size, self._written = (
            max(present, default=0),
            roll_bytes,
            0,
        )  # begins a new file

    def keep_only(self, places: Iterable[SegmentPlace]) -> None:
        """Called at the start with all places in the index: remove every other file."""
        self._wanted = Counter(place.segment for place in places)
        for path in self.directory.glob("*.seg"):
            if not self._wanted[int(path.stem)]:
                path.unlink()

    # --- for the writing thread

    def mark(self) -> Mark:
        return Mark(self._current, self._size, self._written)

    def append(self, *parts: bytes | memoryview) -> SegmentPlace:
        """Append the parts as one payload. It is on the disk only after `sync`."""
        length, crc = sum(len(part) for part in parts), 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        room = os.statvfs(self.directory)
        if room.f_bavail * room.f_frsize < length + self.reserve_bytes:
            raise StoreFull(
                f"{self.directory}: less than {self.reserve_bytes >> 20} MiB would stay free on the disk; free some "
                "space, and send it again: nothing was stored"
            )
        if self._size >= self.roll_bytes:
            self._begin()
        file, offset = self._open[self._current], self._size
        try:
            _write(file.descriptor, [_HEAD.pack(length, crc), *parts], offset)
        except OSError:
            os.ftruncate(file.descriptor, offset)
            raise
        self._size += _HEAD.size + length
        self._written += 1
        self._dirty.add(self._current)
        with self._lock:
            self._wanted[self._current] += 1
            self._dead.discard(self._current)  # all its earlier payloads may have been forgotten
        return SegmentPlace(self._current, offset + _HEAD.size, length, crc)

    def sync(self) -> None:
        for segment in self._dirty:
            os.fdatasync(self._open[segment].descriptor)
        self._dirty.clear()
        if self._named:
            atomic_write.sync(self.directory)
            self._named = False

    def cut_back(self, mark: Mark) -> None:
        """Undo everything that was appended since the mark."""
        since = range(mark.segment + 1, self._current + 1)
        with self._lock:
            for segment in since:
                self._written -= self._wanted.pop(segment, 0)
                self._dead.discard(segment)
                self._open.pop(segment, None)
            self._wanted[mark.segment] -= self._written - mark.written
        self._written, self._current = mark.written, mark.segment
        for segment in since:  # the number is used again, so the file must not exist
            self._path(segment).unlink(missing_ok=True)
        if mark.segment in self._open:
            os.ftruncate(self._open[mark.segment].descriptor, mark.size)
            self._size = mark.size
        else:
            self._size = self.roll_bytes
        self._dirty = {number for number in self._dirty if number <= mark.segment}

    def sweep(self) -> None:
        """Delete the files without needed payloads."""
        with self._lock:
            dead = [number for number in self._dead if number != self._current]
            self._dead.difference_update(dead)
            for number in dead:
                self._open.pop(number, None)  # readers may still hold it open
        for number in dead:
            self._path(number).unlink(missing_ok=True)

    # --- for any thread

    def read(self, place: SegmentPlace) -> bytes:
        file = self._file(place.segment)
        payload = os.pread(file.descriptor, place.length, place.offset)
        if len(payload) != place.length or zlib.crc32(payload) != place.crc:
            raise StoreError(
                f"{self._path(place.segment)}: the {place.length} bytes at {place.offset} are not what was written; "
                "the disk or another program changed them"
            )
        return payload

    def forget(self, places: Iterable[SegmentPlace]) -> None:
        """Note that these payloads are not needed any more, after the index on the disk no longer lists them."""
        with self._lock:
            for place in places:
                self._wanted[place.segment] -= 1
                if self._wanted[place.segment] <= 0:
                    del self._wanted[place.segment]
                    self._dead.add(place.segment)

    @property
    def size_bytes(self) -> int:
        total = 0
        for path in self.directory.glob("*.seg"):
            with suppress(FileNotFoundError):  # deleted meanwhile
                total += path.stat().st_size
        return total

    def close(self) -> None:
        self._open.clear()

    def _begin(self) -> None:
        number = self._current + 1
        descriptor = os.open(self._path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._open[number] = _File(descriptor)
        self._current, self._size, self._named = number, 0, True

    def _file(self, segment: int) -> _File:
        with self._lock:
            if segment not in self._open:
                self._open[segment] = _File(os.open(self._path(segment), os.O_RDONLY | os.O_CLOEXEC))
            return self._open[segment]

    def _path(self, segment: int) -> Path:
        return self.directory / f"{segment:08d}.seg"


class _File:
    """An open file, which is closed when its last user drops it."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def _write(descriptor: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    written = os.pwritev(descriptor, parts, offset)
    total = sum(len(part) for part in parts)
    if written < total:  # rare: a signal, or a disk that is about to be full
        rest = memoryview(b"".join(parts))
        while written < total:
            written += os.pwrite(descriptor, rest[written:], offset + written)
