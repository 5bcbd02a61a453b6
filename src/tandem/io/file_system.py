"""Which file system a directory is on, whether it mixes what two hosts write, and which directory is in memory."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")
_MEMORY = Path("/dev/shm")
_BY_PAGES = ("nfs", "nfs4", "cifs", "smb3", "9p")
"""Their clients keep pages, and may write a whole page back of which only some bytes were written here."""


def file_system_of(directory: Path, mounts: Path = _MOUNTS) -> str:
    """Return the type of the file system, as Linux names it; empty where the system has no list of mounts."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    place, kind = Path(directory).resolve(), ""
    longest = 0
    for line in lines:
        mounted, its_kind = line.split()[1:3]
        at = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), mounted))
        if place.is_relative_to(at) and len(at.parts) >= longest:  # a later mount hides an earlier one
            longest, kind = len(at.parts), its_kind
    return kind


def memory_backed() -> Path:
    """Return a directory in memory; that of temporary files where there is none."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def mixes_writers(kind: str) -> bool:
    """Return whether a client may overwrite bytes beside its own, which another host has written."""
    return kind in _BY_PAGES
