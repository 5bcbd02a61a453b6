"""Read files and JSON that other programs may have changed: regular files of limited size, JSON of limited depth.

This also runs in other engines' environments, so it uses the standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 64 * 2**20


def parsed(text: str | bytes) -> Any:
    """Parse JSON as `json.loads` does, but raise ValueError for too deep nesting, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def read_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """Return the JSON of a file. OSError as `read_bounded`; ValueError if it is not JSON or not text."""
    return parsed(read_bounded(path, most_bytes))


def read_bounded(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. OSError if it cannot be read, is not a regular file, or is larger."""
    # O_NONBLOCK, because opening a named pipe would wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        check_regular(file.fileno(), path)
        return bounded(file, path, most_bytes)


def bounded(file: BinaryIO, path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of an open file. OSError if it is larger."""
    size = os.fstat(file.fileno()).st_size
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", str(path))
    return file.read(size)


def check_regular(descriptor: int, path: Path) -> None:
    """Raise OSError if the open file is a directory, a named pipe or a device."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
