"""What is freed goes back to the system, where it is large: for training on a CPU.

glibc keeps freed memory for later, and cuts large pieces of it up for small ones: a step then takes up to twice what it
holds at once. Giving everything back at once would cost up to half of the speed, since each page must be cleared before
it comes again. So inside `exact`, where the peaks are (forward, and an update), large blocks are mapped one by one; in
backward, whose blocks are short-lived, they are kept and used again.
"""

from __future__ import annotations

import ctypes
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.ops.byte_sizes import MAPPED_ALONE_BYTES

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE, _SLACK = 1_000_000, 2**26
"""Bytes: a block that is mapped by itself in `exact`, and what may stay unused at the heap's end."""


def why_not() -> str:
    """Empty if memory can be given back here."""
    return "" if platform.libc_ver()[0] == "glibc" else "only glibc can be told to"


@contextmanager
def exact() -> Iterator[None]:
    """What is free when it begins is given back, and large blocks that are freed inside. Without glibc: nothing."""
    if why_not():
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, _SLACK)
    libc.mallopt(_MMAP_THRESHOLD, _LARGE)
    libc.malloc_trim(0)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, MAPPED_ALONE_BYTES)


def peak_bytes() -> int:
    """The most that this process held. What the kernel tells its parent would not do: it counts the parent, too, as
    large as that was when it started this process."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
