"""Bring a run directory's small files into the control plane's mirror, byte by byte.

consumes: files as they are on the disk   waits for: nothing
produces: pieces, each of which goes on where the mirror is, or begins the next generation of its file

What only grows (rows, logs) is sent from where it was; what was replaced or cut back is sent whole. Whether the bytes
before are still the same is asked of their SHA-256, and not of a file that only grows and is still the same file. What
this overlooks, the digests of the end find.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tandem.shapes.agent import APPEND_BYTES, PIECE_BYTES, FileDigest, Piece, Stream

_log = logging.getLogger(__name__)

_NOT_SHIPPED = ("checkpoints", "export", "deploy")
_ENDINGS_NOT_SHIPPED = (".safetensors", ".gguf", ".pt", ".bin", ".tmp", ".part", ".sqlite3-shm")
_ONCE_ENDED = "samples/"
"""A database, whose files belong together: it is sent when the trainer has ended."""
_GROWING = (".jsonl", ".txt", ".log")
_NOTHING = Path(os.devnull)
"""In place of a file that is gone: the mirror of it becomes empty."""
_LARGEST_REPLACED = 32 * 2**20
"""A file that does not only grow is left out beyond this size."""


@dataclass
class _Mirrored:
    """How far the mirror of a file is."""

    generation: int
    size: int
    sha: Any
    """Of those bytes, so that more can be added."""
    inode: int
    changed_ns: int


class Shipper:
    def __init__(
        self, run_dir: Path, streams: Mapping[str, Stream], *, extra: Mapping[str, Path] | None = None
    ) -> None:
        """`streams`: the mirror, from executions before: their files are sent again. `extra`: files from elsewhere."""
        self._run_dir, self._extra = run_dir, dict(extra or {})
        self._generations = {file: stream.generation for file, stream in streams.items()}
        self._known: dict[str, _Mirrored] = {}
        self._sent: dict[str, _Mirrored] = {}
        self._pieces: list[Piece] = []
        self.left_out: set[str] = set()
        """What the control plane refused."""
        self.ended = False
        """Whether the trainer has ended: nothing changes any more."""

    def pieces(self) -> Sequence[Piece]:
        """Return what to send next. Without an answer since the last call: the same again."""
        if self._pieces:
            return self._pieces
        room, num_files = APPEND_BYTES // 2, 0
        files = self._files()
        gone = sorted(set(self._generations) - {file for file, _ in files} - self.left_out) if self.ended else []
        for file, path in [*files, *((file, _NOTHING) for file in gone)]:
            if num_files >= 64 or room <= 0:
                break
            new = self._behind(file, path, room)
            room -= sum(len(piece.data) for piece in new)
            num_files += bool(new)
            self._pieces += new
        return self._pieces

    def answered(self, streams: Mapping[str, Stream]) -> None:
        """Take the answer to the pieces of the last call."""
        for file, sent in self._sent.items():
            stream = streams.get(file)
            if stream is not None and (stream.generation, stream.size) == (sent.generation, sent.size):
                self._known[file], self._generations[file] = sent, sent.generation
            elif stream is not None:
                self.again(file, stream)
        self._sent, self._pieces = {}, []

    def refused(self, why: str) -> None:
        """Leave out the files of the last call: one of them cannot be brought over."""
        _log.warning("not mirrored: %s: %s", ", ".join(sorted(self._sent)), why)
        self.left_out |= set(self._sent)
        self._sent, self._pieces = {}, []

    def again(self, file: str, stream: Stream) -> None:
        """Send a file whole, since the mirror is not where it was thought to be."""
        self._known.pop(file, None)
        self._generations[file] = stream.generation

    def digests(self) -> dict[str, FileDigest]:
        """Return the digest of each file that must be mirrored, as it is on the disk now."""
        found: dict[str, FileDigest] = {}
        for file, path in self._files():
            with path.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                found[file] = FileDigest(size=size, sha256=_sha_of(opened, size).hexdigest())
        return found

    # --- files

    def _files(self) -> list[tuple[str, Path]]:
        """Return the files to mirror now, the smallest first: what a watcher looks at is small."""
        found: list[tuple[int, str, Path]] = []
        for file, path in [*self._walk(self._run_dir, ""), *self._extra.items()]:
            try:
                size = path.stat().st_size
            except OSError:
                continue
            if file.startswith(_ONCE_ENDED) and not self.ended:
                continue
            if file not in self.left_out and (_grows(file) or size <= _LARGEST_REPLACED):
                found.append((size, file, path))
        return [(file, path) for _, file, path in sorted(found)]

    def _walk(self, directory: Path, under: str) -> Iterator[tuple[str, Path]]:
        try:
            entries = list(os.scandir(directory))
        except OSError:
            return
        for entry in entries:
            name = under + entry.name
            if entry.name.startswith(".") or not entry.name.isprintable() or len(name) > 300 or name in _NOT_SHIPPED:
                continue
            if entry.is_dir(follow_symlinks=False):
                if name.count("/") < 6:
                    yield from self._walk(Path(entry.path), f"{name}/")
            elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(_ENDINGS_NOT_SHIPPED):
                yield name, Path(entry.path)

    def _behind(self, file: str, path: Path, room: int) -> list[Piece]:
        """Return pieces of a file that the mirror lacks."""
        try:
            opened = path.open("rb")
        except OSError:  # gone meanwhile
            return []
        with opened:
            stat, known = os.fstat(opened.fileno()), self._known.get(file)
            if known is not None and (known.inode, known.size, known.changed_ns) == _state(stat):
                return []
            if known is not None and _goes_on(file, known, stat, opened):
                known.inode, known.changed_ns = stat.st_ino, stat.st_mtime_ns
                generation, offset, sha = known.generation, known.size, known.sha.copy()
                if offset == stat.st_size:
                    return []
            else:
                generation, offset, sha = self._generations.get(file, 0) + 1, 0, hashlib.sha256()
            pieces: list[Piece] = []
            opened.seek(offset)
            end = min(stat.st_size, offset + room)
            while offset < end or not pieces:
                data = opened.read(min(PIECE_BYTES, end - offset))
                if not data and pieces:
                    break  # cut meanwhile
                digest = hashlib.sha256(data).hexdigest()
                pieces.append(Piece(file=file, generation=generation, offset=offset, data=data, sha256=digest))
                sha.update(data)
                offset += len(data)
                if not data:
                    break
        changed_ns = stat.st_mtime_ns if offset == stat.st_size else 0
        self._sent[file] = _Mirrored(generation, offset, sha, stat.st_ino, changed_ns)
        return pieces


def _state(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _goes_on(file: str, known: _Mirrored, stat: os.stat_result, opened: BinaryIO) -> bool:
    """Return whether the file begins with what the mirror has."""
    if stat.st_size < known.size:
        return False
    if stat.st_ino == known.inode and _grows(file):
        return True
    return _sha_of(opened, known.size).digest() == known.sha.digest()


def _grows(file: str) -> bool:
    return file.endswith(_GROWING) or file == "console"


def _sha_of(opened: BinaryIO, size: int) -> Any:
    sha, left = hashlib.sha256(), size
    opened.seek(0)
    while left > 0 and (data := opened.read(min(2**20, left))):
        sha.update(data)
        left -= len(data)
    return sha
