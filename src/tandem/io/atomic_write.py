"""Atomic writes: a reader finds the old or the new content, never a part, even after a power cut."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PRIVATE = 0o700


def make_directory(path: Path, *, mode: int = 0o777) -> Path:
    """Make a directory and its missing parents durably, and return it. `mode`: of `path` only, reduced by the umask;
    PRIVATE for directories with prompts, answers or keys. An existing directory keeps its mode."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=mode if each == path else 0o777, exist_ok=True)
        sync(each.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return path


def write_bytes(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write beside, fsync, rename, fsync the directory: after a power cut the name holds all of it or the old file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk it would take the remaining space
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def directory(path: Path, *, durable: bool = True) -> Generator[Path]:
    """Fill a directory that appears under `path` only if the block succeeds. An older one is moved aside first, so
    after a crash `path` may be missing but is never partial. `durable`: also after a power cut; a directory that is
    only passed to a running process need not wait for the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for each in (temporary, *temporary.rglob("*")) if durable else ():
            if each.is_file() or each.is_dir():
                sync(each)
        replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
        if path.exists():
            path.replace(replaced)
        temporary.replace(path)
        if durable:
            sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Block until a file's bytes, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
