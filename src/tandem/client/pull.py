"""Bring a run's mirror into a directory: only what grew travels, and a file is never seen half replaced.

A small file beside the others remembers each file's generation, so that a later pull goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tandem.errors import ControlError
from tandem.io import atomic_write
from tandem.io.bounded_json import read_json
from tandem.shapes.runs import FileInfo

MARKS = ".mirror.json"
_PART_BYTES = 4 * 2**20

Read = Callable[[str, int, int], tuple[bytes, int, int]]


@dataclass(frozen=True, slots=True)
class Pulled:
    """What one pull did."""

    directory: Path
    files: int
    bytes: int
    """That travelled."""


def pull(files: Callable[[], list[FileInfo]], read: Read, directory: Path) -> Pulled:
    """Make `directory` hold what the mirror holds. Files that the mirror does not have stay."""
    atomic_write.make_directory(directory)
    marks, travelled, listed = _marks(directory), 0, files()
    for each in listed:
        path = _inside(directory, each.file)
        travelled += _bring(path, each, marks.get(each.file, 0), read, marks)
    text = json.dumps(marks)
    temporary = directory / f"{MARKS}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(directory / MARKS)
    return Pulled(directory, len(listed), travelled)


def _bring(path: Path, there: FileInfo, known: int, read: Read, marks: dict[str, int]) -> int:
    here = path.stat().st_size if path.exists() else -1
    if known == there.generation and here == there.size:
        return 0
    if known == there.generation and 0 <= here < there.size:
        return _append(path, there, here, read)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.pulled")
    while True:  # until it was read whole without being replaced meanwhile
        data, generation, size = read(there.file, 0, _PART_BYTES)
        with temporary.open("wb") as file:
            file.write(data)
            while (at := file.tell()) < size:
                data, now, size = read(there.file, at, _PART_BYTES)
                if now != generation or not data:
                    break
                file.write(data)
            else:
                break
    travelled = temporary.stat().st_size
    temporary.replace(path)
    marks[there.file] = generation
    return travelled


def _append(path: Path, there: FileInfo, here: int, read: Read) -> int:
    """Append what grew. If the file was replaced meanwhile, the next pull brings it whole."""
    at = here
    with path.open("ab") as file:
        while at < there.size:
            data, generation, _ = read(there.file, at, _PART_BYTES)
            if generation != there.generation or not data:
                break
            file.write(data)
            at += len(data)
    return at - here


def _inside(directory: Path, file: str) -> Path:
    """Return the file's path. A server is not trusted to name only files inside the directory."""
    parts = file.split("/")
    if any(part in ("", ".", "..") or part.startswith(".") or "\\" in part or "\0" in part for part in parts):
        raise ControlError(
            f"the server names the file {file!r}, which is not inside the run directory; nothing was written"
        )
    path = directory.joinpath(*parts)
    if any(
        parent.is_symlink() for parent in (path, *path.parents) if parent != directory and directory in parent.parents
    ):
        raise ControlError(f"{path}: is a link, so it is not written through; remove it")
    return path


def _marks(directory: Path) -> dict[str, int]:
    try:
        found: object = read_json(directory / MARKS)
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    table = cast("Mapping[str, Any]", found)
    return {file: number for file, number in table.items() if isinstance(number, int)}
