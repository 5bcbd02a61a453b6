"""What of a directory would be left after a power cut, at every point of what a piece of code does to the disk.

Bytes are safe once their file was fsynced, and a name once its directory was. Whatever was not may be there or not, so
each cut is looked at twice: with no name that is not safe, and with every name, where what was not fsynced is empty.
SQLite's files are taken as they are: it does its own fsyncs (`PRAGMA synchronous`), which no wrapper in Python sees.

Wrapped are os.fsync, os.fdatasync, os.rename, os.replace and os.link: a cut just before and just after each of them.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_SYNCS, _MOVES = ("fsync", "fdatasync"), ("rename", "replace", "link")
_SQLITE = ("index.sqlite3", "index.sqlite3-wal")


@dataclass
class Cut:
    """`after`: the call that came last. `acked`: what was promised by then."""

    after: str
    acked: list[Any]
    files: dict[str, bytes | None]
    """By path; None for a directory."""

    def lay_out(self, place: Path) -> Path:
        """Write what was left into a new directory."""
        place.mkdir()
        for name, content in sorted(self.files.items()):
            if content is None:
                (place / name).mkdir()
            else:
                (place / name).write_bytes(content)
        return place


class Disk:
    """Everything under `root` from now on; what is there already is safe, and `root` itself always is."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.acked, self.cuts = root, list[Any](), list[Cut]()
        self._lock = threading.RLock()
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._held: list[int] = []
        """Descriptors: a number of an inode is not given again while one is open."""
        for path in (root, *root.rglob("*")):
            self._sync(path)
        for name in (*_SYNCS, *_MOVES):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def ack(self, what: Any) -> None:
        """It was promised just now: no cut from here on may lose it."""
        with self._lock:
            self.acked.append(what)
            self._cut(f"ack {what}")

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self._cut(f"before {name} {arguments}")
                result = real(*arguments, **options)
                if name in _SYNCS:
                    self._sync(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")))
                self._cut(f"after {name} {arguments}")
                return result

        return call

    def _sync(self, path: Path) -> None:
        if not path.is_relative_to(self.root) or path.is_symlink() or not path.exists():
            return
        descriptor = os.open(path, os.O_RDONLY)
        self._held.append(descriptor)
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = {each.name: each.inode() for each in os.scandir(path)}
        else:
            self._bytes[found.st_ino] = path.read_bytes()

    def _cut(self, after: str) -> None:
        present: dict[int, Path] = {}
        for path in (self.root, *self.root.rglob("*")):
            present.setdefault(path.stat().st_ino, path)
        safe: dict[str, bytes | None] = {}
        self._collect("", self.root.stat().st_ino, present, safe)
        every = {
            str(path.relative_to(self.root)): self._content(path) for path in present.values() if path != self.root
        }
        for files in (safe, every):
            if not self.cuts or (self.cuts[-1].files, self.cuts[-1].acked) != (files, self.acked):
                self.cuts.append(Cut(after, list(self.acked), files))

    def _collect(self, prefix: str, directory: int, present: dict[int, Path], into: dict[str, bytes | None]) -> None:
        for name, inode in self._names.get(directory, {}).items():
            path = f"{prefix}{name}"
            if inode in self._names or (inode in present and present[inode].is_dir()):
                into[path] = None
                self._collect(f"{path}/", inode, present, into)
            else:
                into[path] = self._bytes.get(inode, b"")
        where = present.get(directory)
        for name in _SQLITE if where is not None else ():
            if (where / name).exists():
                into[f"{prefix}{name}"] = (where / name).read_bytes()

    def _content(self, path: Path) -> bytes | None:
        if path.is_dir():
            return None
        return path.read_bytes() if path.name in _SQLITE else self._bytes.get(path.stat().st_ino, b"")
