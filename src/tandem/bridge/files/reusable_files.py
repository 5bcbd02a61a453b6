"""Overwrite old version files in the machine's memory instead of creating new ones.

Writing existing pages takes a twentieth of the time of new ones, and a GPU can write into them directly. Only for files
that no engine has mapped: through a mapping an engine would see the next version overwrite the one that it serves.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _MappedFile:
    """A file of one version, or a spare one, mapped for writing."""

    descriptor: int
    mapped: Tensor
    is_pinned: bool = False
    is_written: bool = False
    """A thread writes it now; the thread may have been left behind by its deadline."""

    @property
    def exists(self) -> bool:
        return os.fstat(self.descriptor).st_nlink > 0

    def pin(self) -> str:
        """Pin the pages so that the GPU can write them. Return why that failed; empty if it did not."""
        try:
            code = _cuda().cudaHostRegister(self.mapped.data_ptr(), self.mapped.numel(), 0)
        except RuntimeError as error:
            return str(error)
        self.is_pinned = int(code) == 0
        if self.is_pinned:
            return ""
        with suppress(RuntimeError):  # clears the error; else the next kernel launch raises it
            torch.zeros(1, device="cuda")
        return f"{code}"

    def drop(self) -> None:
        if self.is_pinned:
            _cuda().cudaHostUnregister(self.mapped.data_ptr())
        os.close(self.descriptor)  # the mapping is freed with its tensor


@dataclass(slots=True)
class _HeldFiles:
    of_versions: dict[int, _MappedFile] = field(default_factory=dict[int, _MappedFile])
    """By inode number, which stays when a directory is renamed."""
    spare: list[tuple[Path, _MappedFile]] = field(default_factory=list[tuple[Path, _MappedFile]])
    is_closed: bool = False

    def drop(self, owner: int) -> None:
        """Drop all files. One that a thread writes now is dropped by that thread."""
        if os.getpid() != owner:
            return
        for file in [*self.of_versions.values(), *(file for _, file in self.spare)]:
            if not file.is_written:
                file.drop()
        self.of_versions.clear()
        self.spare.clear()
        self.is_closed = True


class ReusableFiles:
    """The files of an adapter bridge. Any thread may call, also one that its deadline left behind."""

    def __init__(self, home: Path) -> None:
        """`home`: for spare files; on the same file system as the versions."""
        self._home = home
        self._lock = threading.Lock()
        self._held = _HeldFiles()
        self._end = weakref.finalize(self, self._held.drop, os.getpid())
        self._count = 0
        self._why_not_pinned: str | None = None

    def put(self, raw: Tensor, path: Path) -> None:
        """Write these bytes to a new path; return when they are written."""
        with self._lock:
            if self._held.is_closed:
                raise OSError("closed")
            file = self._reused_or_new(raw.numel(), path)
            file.is_written = True
            self._held.of_versions[os.fstat(file.descriptor).st_ino] = file
        try:
            file.mapped.copy_(raw, non_blocking=file.is_pinned)
            if raw.is_cuda:
                torch.cuda.current_stream(raw.device).synchronize()
                if not file.is_pinned and self._why_not_pinned is None:
                    self._pin(file)
        finally:
            with self._lock:
                file.is_written = False
                if self._held.is_closed:
                    file.drop()

    def take_back(self, path: Path) -> None:
        """Make the file of a deleted version a spare one. Does nothing for other files."""
        with self._lock:
            try:
                number = path.stat().st_ino
            except FileNotFoundError:
                return
            file = self._held.of_versions.get(number)
            if file is not None and not file.is_written:
                del self._held.of_versions[number]
                self._count += 1
                self._held.spare.append((path.rename(self._home / f"spare-{self._count}"), file))

    def drop_spare(self) -> None:
        """Drop the spare files: none will be reused."""
        with self._lock:
            while self._held.spare:
                self._drop_one()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _reused_or_new(self, size: int, path: Path) -> _MappedFile:
        held = self._held
        deleted = [n for n, file in held.of_versions.items() if not (file.is_written or file.exists)]
        for number in deleted:  # another process deleted it with its version
            held.of_versions.pop(number).drop()
        while held.spare:
            spare, file = held.spare[-1]
            if file.mapped.numel() == size and file.exists:
                spare.rename(path)
                held.spare.pop()
                return file
            self._drop_one()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # without memory for a page, writing it would kill the process
            # The tensor holds the mapping, and frees it.
            mapped: Any = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        return _MappedFile(descriptor, mapped)

    def _drop_one(self) -> None:
        spare, file = self._held.spare.pop()
        file.drop()
        spare.unlink(missing_ok=True)

    def _pin(self, file: _MappedFile) -> None:
        """Pin a file once its pages exist."""
        if why_not := file.pin():
            self._why_not_pinned = why_not
            _log.warning("adapters: the host writes their files, which is slower: %s", why_not)


def _cuda() -> Any:
    return torch.cuda.cudart()  # its stub says that it may be None
