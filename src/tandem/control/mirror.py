"""Mirrors of run directories: the small files of each run, byte by byte as its agent sent them.

consumes: pieces of files, from the agent that holds the run's attempt   waits for: the disk
produces: files under DIRECTORY/RUN/, for callers that read them

How long a file is, the file says; its generation is a row. A new generation changes the file first and its row after
that. So after a crash between the two the agent sends the same piece again, and it still fits. A file that is replaced
every second would cost a write of the database each: only its first replacement by this process is noted, and the next
process begins far above, so that no number is used twice. Nothing waits for the
disk before the run's end: after a power cut a file may be shorter or older. The agent, which has it all, goes on from
there, or finds at the end that the digest differs, and sends the file again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from tandem.control.store import Store
from tandem.control.tables import Stream as StreamRow
from tandem.errors import NotKnown, SpecError, StoreFull
from tandem.io import atomic_write
from tandem.shapes.agent import FileDigest, Piece, Stream

RUN_BYTES = 16 * 2**30
"""The most bytes of one run's mirror."""
_PARTS, _PART_BYTES = 8, 200
_APART = 2**32  # more generations than one process makes of a file


@dataclass(frozen=True, slots=True)
class Read:
    """A part of a file, and how the file is."""

    data: bytes
    generation: int
    size: int


class Mirror:
    def __init__(self, directory: Path, store: Store, *, run_bytes: int = RUN_BYTES) -> None:
        self.directory, self._store, self._run_bytes = directory, store, run_bytes
        self._generations: dict[str, dict[str, int]] = {}
        self._noted: defaultdict[str, set[str]] = defaultdict(set)
        self.locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By run: held while an agent is checked and its pieces are written, so that a fenced one writes nothing."""
        atomic_write.make_directory(directory, mode=atomic_write.PRIVATE)

    async def streams(self, run: str) -> dict[str, Stream]:
        """Return how far each file of a run is."""
        known = await self._known(run)
        return await asyncio.to_thread(self._sizes, run, dict(known))

    async def append(self, run: str, pieces: Sequence[Piece]) -> dict[str, Stream]:
        """Write the pieces that fit; return how far each of their files is. The caller holds the run's lock."""
        known = await self._known(run)
        if not pieces:
            return {}
        found, changed = await asyncio.to_thread(self._write, run, known, pieces)
        if unnoted := {file: number for file, number in changed.items() if file not in self._noted[run]}:
            await self._store.write(partial(_note, run=run, generations=unnoted))
            self._noted[run] |= {file for file, number in unnoted.items() if number > 1}
        known.update(changed)
        return found

    async def differing(self, run: str, files: Mapping[str, FileDigest]) -> dict[str, Stream]:
        """Return the files whose mirror is not the file with this digest. What is right is on the disk for good."""
        known = await self._known(run)
        wrong = await asyncio.to_thread(self._wrong, run, files)
        return await asyncio.to_thread(self._sizes, run, {file: known.get(file, 0) for file in wrong})

    async def read(self, run: str, file: str, offset: int, limit: int) -> Read:
        """Return bytes of a file, all of one generation."""
        known = await self._known(run)
        while True:
            if (generation := known.get(file)) is None:
                raise NotKnown(f"the mirror of run '{run}' has no file '{file}'", field="file")
            try:
                data, size = await asyncio.to_thread(_read, self._path(run, file), offset, limit)
            except FileNotFoundError:  # its row is in the database, its bytes were lost by a power cut
                data, size = b"", 0
            if known.get(file) == generation:
                return Read(data, generation, size)

    # --- on a thread

    def small(self, run: str, file: str, limit: int = 2**16) -> bytes:
        """Return the first bytes of a file; none if it is not there."""
        try:
            with self._path(run, file).open("rb", buffering=0) as opened:
                return opened.read(limit)
        except FileNotFoundError:
            return b""

    def _write(
        self, run: str, known: Mapping[str, int], pieces: Sequence[Piece]
    ) -> tuple[dict[str, Stream], dict[str, int]]:
        changed, found = dict[str, int](), dict[str, Stream]()
        streams = self._sizes(run, known)
        room = self._run_bytes - sum(stream.size for stream in streams.values())
        for piece in pieces:
            if hashlib.sha256(piece.data).hexdigest() != piece.sha256:
                raise SpecError(f"the piece of '{piece.file}' at {piece.offset}: its bytes do not have its sha256")
            if len(piece.data) > room:
                raise StoreFull(f"the mirror of run '{run}' has {self._run_bytes} bytes, which is the most")
            path = self._path(run, piece.file)
            now = found.get(piece.file) or streams.get(piece.file) or Stream(generation=0, size=0)
            if piece.generation == now.generation and piece.offset == now.size and now.generation:
                _append(path, now.size, piece.data)
            elif piece.generation == now.generation + 1 and piece.offset <= now.size:
                _begin(path, piece.offset, piece.data)
                changed[piece.file] = piece.generation
            else:
                found[piece.file] = now
                continue
            room -= len(piece.data)
            found[piece.file] = Stream(generation=piece.generation, size=piece.offset + len(piece.data))
        return found, changed

    def _sizes(self, run: str, generations: Mapping[str, int]) -> dict[str, Stream]:
        found = dict[str, Stream]()
        for file, generation in generations.items():
            try:
                size = self._path(run, file).stat().st_size if generation else 0
            except FileNotFoundError:
                size = 0
            found[file] = Stream(generation=generation, size=size)
        return found

    def _wrong(self, run: str, files: Mapping[str, FileDigest]) -> list[str]:
        wrong: list[str] = []
        for file, digest in files.items():
            try:
                with self._path(run, file).open("rb") as opened:
                    same = os.fstat(opened.fileno()).st_size == digest.size
                    same = same and hashlib.file_digest(opened, "sha256").hexdigest() == digest.sha256
                    os.fsync(opened.fileno())
            except FileNotFoundError:
                same = False
            if not same:
                wrong.append(file)
        return wrong

    def _path(self, run: str, file: str) -> Path:
        parts = file.split("/")
        if len(parts) > _PARTS or not all(_is_plain(part) for part in parts):
            raise SpecError(
                f"file = {file!r}: must be a path inside the run directory, of printable characters; no part "
                "begins with '.'"
            )
        return self.directory.joinpath(run, *parts)

    async def _known(self, run: str) -> dict[str, int]:
        if (known := self._generations.get(run)) is None:
            found = await self._store.read(partial(_generations_of, run=run))
            found = {file: number if number == 1 else number + _APART for file, number in found.items()}
            known = self._generations.setdefault(run, found)
        return known


def _is_plain(part: str) -> bool:
    begins_well = part[:1] not in ("", ".")
    return begins_well and part.isprintable() and "\\" not in part and len(part.encode()) < _PART_BYTES


def _append(path: Path, size: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(size)
        file.write(data)


def _begin(path: Path, kept: int, data: bytes) -> None:
    """Keep the first bytes of a file and write the data behind them; a reader sees the old file or the new one."""
    begin = b""
    if kept:
        with path.open("rb") as file:
            begin = file.read(kept)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(begin + data)
    except FileNotFoundError:  # the first file of its directory
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(begin + data)
    temporary.replace(path)


def _read(path: Path, offset: int, limit: int) -> tuple[bytes, int]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        return file.read(min(limit, max(0, size - offset))), size


def _generations_of(session: Session, run: str) -> dict[str, int]:
    asked = sa.select(StreamRow.file, StreamRow.generation).where(StreamRow.run == run)
    return dict(session.execute(asked).all())


def _note(session: Session, run: str, generations: Mapping[str, int]) -> None:
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    statement = insert(cast("sa.Table", StreamRow.__table__))
    newer = {"generation": statement.excluded.generation}
    session.execute(
        statement.on_conflict_do_update(index_elements=["run", "file"], set_=newer),
        [{"run": run, "file": file, "generation": generation} for file, generation in generations.items()],
    )
