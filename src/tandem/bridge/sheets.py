"""Files in the machine's memory that are written again for another version: pages that are there already take a
twentieth of the time of new ones, and a GPU writes into them by itself.

Only for files that nobody has mapped: whoever has, would see the next version come into the one before.
"""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import dataclass
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
        return "" if self.is_pinned else f"{code}"

    def drop(self) -> None:
        if self.is_pinned:
            _cuda().cudaHostUnregister(self.mapped.data_ptr())
        os.close(self.descriptor)  # the mapping goes with its tensor


class Sheets:
    def __init__(self, home: Path) -> None:
        """`home`: where those lie that are of no version; on the file system of all others."""
        self._home = home
        self._of_versions: dict[int, _Sheet] = {}
        """By their files' numbers, which stay when a directory is renamed."""
        self._spare: list[tuple[Path, _Sheet]] = []
        self._count = 0
        self._why_not_pinned: str | None = None

    def put(self, raw: Tensor, path: Path) -> None:
        """A new file of these bytes; they are there when this returns."""
        for number in [number for number, sheet in self._of_versions.items() if not sheet.is_somewhere]:
            self._of_versions.pop(number).drop()  # somebody deleted its version
        sheet = self._another(raw.numel(), path)
        self._of_versions[os.fstat(sheet.descriptor).st_ino] = sheet
        sheet.mapped.copy_(raw, non_blocking=sheet.is_pinned)
        if raw.is_cuda:
            torch.cuda.current_stream(raw.device).synchronize()
            if not sheet.is_pinned and self._why_not_pinned is None:
                self._pin(sheet)

    def take_back(self, path: Path) -> None:
        """Its version is forgotten. Does nothing for a file that is no sheet."""
        try:
            number = path.stat().st_ino
        except FileNotFoundError:
            return
        if (sheet := self._of_versions.pop(number, None)) is not None:
            self._count += 1
            self._spare.append((path.rename(self._home / f"spare-{self._count}"), sheet))

    def close(self) -> None:
        for sheet in [*self._of_versions.values(), *(sheet for _, sheet in self._spare)]:
            sheet.drop()
        self._of_versions, self._spare = {}, []

    def _another(self, size: int, path: Path) -> _Sheet:
        while self._spare:
            spare, sheet = self._spare.pop()
            if sheet.mapped.numel() == size and sheet.is_somewhere:
                spare.rename(path)
                return sheet
            sheet.drop()
            spare.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a page that finds no room when it is written ends the process
            # Held by the tensor, and unmapped with it.
            mapped: Any = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        return _Sheet(descriptor, mapped)

    def _pin(self, sheet: _Sheet) -> None:
        """Once its pages are there."""
        if why_not := sheet.pin():
            self._why_not_pinned = why_not
            _log.warning("adapters: their files are written by the host, which is slower: %s", why_not)


def _cuda() -> Any:
    return torch.cuda.cudart()  # its stub says that it may be None
