"""Return freed memory to the system, if blocks are large, for training on a CPU.

glibc keeps freed memory and cuts large blocks up for small ones, so that a step takes up to twice the memory that it
uses at one time. Returning everything at once would cost up to half of the speed, because the kernel clears each page
before it is used again. So inside `exact`, around the peaks (forward pass and update), large blocks are mapped
separately. In the backward pass, whose blocks are short-lived, they are kept and reused.
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
"""Bytes: blocks from the first size are mapped separately inside `exact`; so much may stay unused at the heap's end."""


def why_not() -> str:
    """Return why memory cannot be returned to the system; empty if it can."""
    return "" if platform.libc_ver()[0] == "glibc" else "only glibc supports it"


@contextmanager
def exact() -> Iterator[None]:
    """Return free memory to the system now, and large blocks that are freed inside. Does nothing without glibc."""
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
    """Return the peak memory of this process. Not from getrusage, which also counts the parent's size at the fork."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
