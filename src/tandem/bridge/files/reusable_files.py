"""Files in the machine's memory that are written again for another version: pages that are there already take a
twentieth of the time of new ones, and a GPU writes into them by itself.

Only for files that nobody has mapped: whoever has, would see the next version come into the one before.
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
class _Sheet:
    descriptor: int
    mapped: Tensor
    is_pinned: bool = False
    is_written: bool = False
    """Now, by a thread, which may have been left behind."""

    @property
    def is_somewhere(self) -> bool:
        return os.fstat(self.descriptor).st_nlink > 0

    def pin(self) -> str:
        """For the GPU to write there; why it cannot, or nothing."""
        try:
            code = _cuda().cudaHostRegister(self.mapped.data_ptr(), self.mapped.numel(), 0)
        except RuntimeError as error:
            return str(error)
        self.is_pinned = int(code) == 0
        if self.is_pinned:
            return ""
        with suppress(RuntimeError):  # or else the next launch raises it
            torch.zeros(1, device="cuda")
        return f"{code}"

    def drop(self) -> None:
        if self.is_pinned:
            _cuda().cudaHostUnregister(self.mapped.data_ptr())
        os.close(self.descriptor)  # the mapping goes with its tensor


@dataclass(slots=True)
class _ReusableFile:
    of_versions: dict[int, _Sheet] = field(default_factory=dict[int, _Sheet])
    """By their files' numbers, which stay when a directory is renamed."""
    spare: list[tuple[Path, _Sheet]] = field(default_factory=list[tuple[Path, _Sheet]])
    is_closed: bool = False

    def drop(self, owner: int) -> None:
        """What is written now is dropped by whoever writes it."""
        if os.getpid() != owner:
            return
        for sheet in [*self.of_versions.values(), *(sheet for _, sheet in self.spare)]:
            if not sheet.is_written:
                sheet.drop()
        self.of_versions.clear()
        self.spare.clear()
        self.is_closed = True


class Sheets:
    """Any thread may call, also one that was left behind by its deadline."""

    def __init__(self, home: Path) -> None:
        """`home`: where those lie that are of no version; on the file system of all others."""
        self._home = home
        self._lock = threading.Lock()
        self._held = _ReusableFile()
        self._end = weakref.finalize(self, self._held.drop, os.getpid())
        self._count = 0
        self._why_not_pinned: str | None = None

    def put(self, raw: Tensor, path: Path) -> None:
        """A new file of these bytes; they are there when this returns."""
        with self._lock:
            if self._held.is_closed:
                raise OSError("closed")
            sheet = self._another(raw.numel(), path)
            sheet.is_written = True
            self._held.of_versions[os.fstat(sheet.descriptor).st_ino] = sheet
        try:
            sheet.mapped.copy_(raw, non_blocking=sheet.is_pinned)
            if raw.is_cuda:
                torch.cuda.current_stream(raw.device).synchronize()
                if not sheet.is_pinned and self._why_not_pinned is None:
                    self._pin(sheet)
        finally:
            with self._lock:
                sheet.is_written = False
                if self._held.is_closed:
                    sheet.drop()

    def take_back(self, path: Path) -> None:
        """Its version is forgotten. Does nothing for a file that is no sheet."""
        with self._lock:
            try:
                number = path.stat().st_ino
            except FileNotFoundError:
                return
            sheet = self._held.of_versions.get(number)
            if sheet is not None and not sheet.is_written:
                del self._held.of_versions[number]
                self._count += 1
                self._held.spare.append((path.rename(self._home / f"spare-{self._count}"), sheet))

    def drop_spare(self) -> None:
        """None will be written again."""
        with self._lock:
            while self._held.spare:
                self._drop_one()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _another(self, size: int, path: Path) -> _Sheet:
        held = self._held
        deleted = [n for n, sheet in held.of_versions.items() if not (sheet.is_written or sheet.is_somewhere)]
        for number in deleted:  # with its version, by somebody
            held.of_versions.pop(number).drop()
        while held.spare:
            spare, sheet = held.spare[-1]
            if sheet.mapped.numel() == size and sheet.is_somewhere:
                spare.rename(path)
                held.spare.pop()
                return sheet
            self._drop_one()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a page that finds no room when it is written ends the process
            # Held by the tensor, and unmapped with it.
            mapped: Any = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        return _Sheet(descriptor, mapped)

    def _drop_one(self) -> None:
        spare, sheet = self._held.spare.pop()
        sheet.drop()
        spare.unlink(missing_ok=True)

    def _pin(self, sheet: _Sheet) -> None:
        """Once its pages are there."""
        if why_not := sheet.pin():
            self._why_not_pinned = why_not
            _log.warning("adapters: their files are written by the host, which is slower: %s", why_not)


def _cuda() -> Any:
    return torch.cuda.cudart()  # its stub says that it may be None
