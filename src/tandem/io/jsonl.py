"""Read and write JSON Lines: one object per line, flushed at once, readable while another process appends."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, cast

from tandem.errors import RunError
from tandem.io import atomic_write
from tandem.io.bounded_json import parsed

Row: TypeAlias = dict[str, Any]

_ROOM_S = 5.0


def read_jsonl(path: Path) -> list[Row]:
    """Return all complete rows; none if the file is missing. A last line without a newline is incomplete, and is
    skipped."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # the rest after the last newline is empty or incomplete
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


@dataclass(frozen=True, slots=True)
class Salvage:
    """The readable rows of a file, and its damaged lines."""

    rows: dict[int, Row]
    """Rows by line number, from 1."""
    damaged: dict[int, str]
    """Errors by line number."""
    torn: bool
    """Whether the last line is incomplete: its write was interrupted."""


def salvage_jsonl(path: Path) -> Salvage:
    """Return the rows of a file that may be damaged, and its bad lines; no file is no rows."""
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    found = Salvage({}, {}, torn=bool(lines[-1]))
    for number, line in enumerate(lines[:-1], start=1):
        if not line.strip():
            continue
        try:
            found.rows[number] = _parse(line, f"{path.name}:{number}")
        except RunError as error:
            found.damaged[number] = str(error)
    return found


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    with JsonlWriter(path) as writer:
        writer.write(row)


class JsonlWriter:
    """Appends rows to an open file. It first removes an incomplete last line of an earlier process."""

    def __init__(self, path: Path) -> None:
        atomic_write.make_directory(path.parent)
        _cut_torn_line(path)
        self._path, self._named = path, path.exists()
        self._file = path.open("a", encoding="utf-8", newline="\n", errors="backslashreplace")  # a lone surrogate

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a row. On a full disk wait a little: a save that fails removes what it wrote."""
        self._file.write(to_line(row))
        until = time.monotonic() + _ROOM_S
        while True:
            try:
                self._file.flush()
                return
            except OSError as error:
                if error.errno != errno.ENOSPC or time.monotonic() > until:
                    raise
            time.sleep(0.05)

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def settle(self) -> None:
        """Wait until everything written is on the disk. Call it on any thread."""
        os.fsync(self._file.fileno())
        if not self._named:
            atomic_write.sync(self._path.parent)
            self._named = True

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def cut_back(path: Path, size_bytes: int | None = None) -> bool:
    """Cut a file to its first `size_bytes`, or to the last complete row. A new file replaces it, so that a process with
    the old file open cannot write to it. Return False if the file was shorter already."""
    content = path.read_bytes() if path.exists() else b""
    kept = content[:size_bytes]
    atomic_write.write_bytes(path, kept[: kept.rfind(b"\n") + 1])
    return size_bytes is None or len(kept) == size_bytes


def to_line(row: Mapping[str, Any]) -> str:
    """Return a row as JSON. NaN and infinity become null, which readers treat as missing."""
    return json.dumps(finite(row), ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) + "\n"


def finite(value: Any) -> Any:
    """Return the value with null for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast("list[Any]", value)]
    return value


def _parse(line: bytes, where: str) -> Row:
    try:
        row = parsed(line)
    except ValueError as error:
        raise RunError(f"{where} is not JSON: {error}; the file was damaged after it was written") from error
    if not isinstance(row, dict):
        raise RunError(f"{where} is not a JSON object, but every line must be one")
    return cast("Row", row)


def _cut_torn_line(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        content = file.read()
        if not content.endswith(b"\n"):  # appending would join two rows into one broken line
            file.truncate(content.rfind(b"\n") + 1)
