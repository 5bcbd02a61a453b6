"""Sealed directories: any later change of their content is detected.

Every file is on the disk before the manifest with its size and SHA-256, and all of them before the directory gets its
name. A reader calls `verify` first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tandem.errors import CheckpointDamaged, CheckpointError
from tandem.io import atomic_write
from tandem.io.bounded_json import parsed, read_bounded

NAME = "MANIFEST.json"
_AT_ONCE_BYTES = 1 << 22
_FORMAT = 1


@contextmanager
def sealed(path: Path, *, permit: Callable[[], None] = lambda: None) -> Generator[Path]:
    """Fill a directory that appears under `path` if the block succeeds. `permit` is called last, and may raise. An
    existing directory is never replaced."""
    atomic_write.make_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        files = {name: {"size": size, "sha256": digest} for name, size, digest in _settled(temporary)}
        manifest = temporary / NAME
        manifest.write_bytes(_render({"format": _FORMAT, "name": path.name, "files": files}))
        atomic_write.sync(manifest)
        atomic_write.sync(temporary)
        permit()
        os.rename(temporary, path)  # ENOTEMPTY if it exists
        atomic_write.sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def verify(path: Path, only: Collection[str] = ()) -> Mapping[str, int]:
    """Verify a sealed directory and return its files with their sizes. CheckpointDamaged names the first changed file.
    `only`: check only these files. CheckpointError if it has another format."""
    files = _read(path)
    for name in only or files:
        file, said = path / name, files.get(name)
        if said is None or not file.is_file() or file.is_symlink():
            raise CheckpointDamaged(f"{file}: is missing")
        if (size := file.stat().st_size) != said["size"]:
            raise CheckpointDamaged(f"{file}: has {size} bytes instead of {said['size']}")
        if digest_of(file) != said["sha256"]:
            raise CheckpointDamaged(f"{file}: its content is not what was written")
    return {name: int(said["size"]) for name, said in files.items()}


def quarantine(path: Path) -> Path:
    """Rename a damaged directory to `damaged-...` and return the new path; nothing is deleted."""
    names = (path.with_name(f"damaged-{path.name}{f'-{number}' if number else ''}") for number in range(1000))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    atomic_write.sync(path.parent)
    return aside


def remove(path: Path) -> None:
    """Remove a directory. After a crash a hidden rest may be left for `sweep`, but no partial directory under its
    name."""
    gone = path.with_name(f".{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove unfinished writes and removals of an earlier process. Only the single writer may call this."""
    if not parent.is_dir():
        return
    for rest in parent.iterdir():
        if rest.name.startswith(".") and rest.name.endswith((".tmp", ".gone")):
            shutil.rmtree(rest, ignore_errors=True)


def digest_of(file: Path) -> str:
    found = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(_AT_ONCE_BYTES):
            found.update(block)
    return found.hexdigest()


def _settled(directory: Path) -> list[tuple[str, int, str]]:
    """Wait until all files are on the disk; return name, size and digest of each."""
    found: list[tuple[str, int, str]] = []
    for path in sorted(directory.rglob("*")):
        atomic_write.sync(path)
        if path.is_file():
            found.append((path.relative_to(directory).as_posix(), path.stat().st_size, digest_of(path)))
    return found


def _read(path: Path) -> dict[str, dict[str, Any]]:
    manifest = path / NAME
    try:
        content = read_bounded(manifest)
    except OSError as error:
        raise CheckpointDamaged(f"{manifest}: cannot be read ({error.strerror})") from error
    body: dict[str, Any] = {}
    try:
        body = cast("dict[str, Any]", parsed(content))
        del body["seal"]
        whole = _render(body) == content and body["name"] == path.name  # nothing in a changed manifest is used
    except (ValueError, LookupError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointDamaged(f"{manifest}: is not the original manifest of {path.name}")
    if (found := body.get("format")) != _FORMAT:
        raise CheckpointError(
            f"{manifest}: has format {'none' if found is None else found}, and this Tandem reads format {_FORMAT}; use "
            "the Tandem that wrote it"
        )
    return body["files"]


def _render(body: Mapping[str, Any]) -> bytes:
    """Return the manifest's text. Its `seal` is the digest of the rest."""
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "seal": seal}, indent=1, sort_keys=True) + "\n").encode()
