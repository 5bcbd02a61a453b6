"""Reads what something else may have written over: regular files of a bounded size, and JSON that may nest too deep.

This also runs in other engines' environments: the standard library only.
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
    """Return what `json.loads` does; ValueError also for what nests too deep for it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def read_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """Return the JSON of a file. OSError as `read_bounded`; ValueError: it is no JSON, or no text."""
    return parsed(read_bounded(path, most_bytes))


def read_bounded(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. OSError: it cannot be read, is of another kind, or is larger."""
    # O_NONBLOCK: to open a named pipe would wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        check_regular(file.fileno(), path)
        return bounded(file, path, most_bytes)


def bounded(file: BinaryIO, path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return what is in the file. OSError if that is more."""
    size = os.fstat(file.fileno()).st_size
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", str(path))
    return file.read(size)


def check_regular(descriptor: int, path: Path) -> None:
    """OSError if what was opened is a directory, a named pipe or a device."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))
