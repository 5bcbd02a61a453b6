"""Copy between files and a GPU by several threads, each with its own pinned memory.

One thread copies a few GB/s from a file's cache; a GPU takes ten times as much.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.io.bounded_json import check_regular

_THREADS = 8
_PIECE_BYTES, _LEAST_BYTES = 32 * 2**20, 2 * 2**20


def opened(path: Path) -> int:
    """Return a descriptor of the regular file at `path`. OSError if it is not a regular file, or if the path has a link
    in it: the sender may write there, and could replace an allowed path by a link to another place."""
    parts = path.absolute().parts
    at = os.open(parts[0], os.O_PATH | os.O_CLOEXEC)
    try:
        for number, part in enumerate(parts[1:], 2):
            # O_NONBLOCK: opening a named pipe would wait for a writer.
            last = os.O_RDONLY | os.O_NONBLOCK if number == len(parts) else os.O_PATH | os.O_DIRECTORY
            above, at = at, os.open(part, last | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(above)
        check_regular(at, path)
    except OSError as error:
        os.close(at)
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OSError(errno.ELOOP, "is a link, or lies behind one", str(path)) from None
        raise
    return at


def read_into(path: Path, flat: Tensor) -> Tensor:
    """Fill `flat` with the file's first bytes and return it. OSError if the file has fewer."""
    descriptor = opened(path)
    try:
        return fill_from(descriptor, flat)
    finally:
        os.close(descriptor)


def fill_from(descriptor: int, flat: Tensor, first: int = 0) -> Tensor:
    """Fill `flat` with a file's bytes from `first` on and return it. OSError if the file has fewer."""
    size = flat.numel()
    step = _step(size)

    def fill(view: memoryview, begin: int) -> None:
        done = 0
        while done < len(view):
            if not (count := os.preadv(descriptor, [view[done:]], first + begin + done)):
                raise OSError(f"it ends after {first + begin + done} bytes instead of {first + size}")
            done += count

    def read(begin: int) -> None:
        piece = flat[begin : begin + step]
        if not flat.is_cuda:
            return fill(_bytes_of(piece), begin)
        buffer, stream = _pinned.mine(flat.device)
        view = _bytes_of(buffer)[: piece.numel()]
        fill(view, begin)
        with torch.cuda.stream(stream):
            piece.copy_(buffer[: len(view)], non_blocking=True)
        stream.synchronize()  # this thread uses the same pinned buffer for the next piece

    list(_readers(os.getpid()).map(read, range(0, size, step)))
    return flat


@cache
def _readers(process: int) -> ThreadPoolExecutor:
    """Return the reading threads, which keep their pinned memory. `process`: a forked process has none of the
    threads."""
    return ThreadPoolExecutor(_THREADS, "read")


class Writing:
    """Writes tensors into files while the caller makes more of them."""

    def __init__(self, still_wanted: Callable[[], None]) -> None:
        """`still_wanted` raises when the caller has given up."""
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: list[Future[None]] = []
        self._still_wanted = still_wanted
        self._slots = threading.BoundedSemaphore(4 * _THREADS)  # pieces that wait to be written take memory

    def write(self, descriptor: int, raw: Tensor, offset: int) -> None:
        """Write `raw` at `offset`. Kernels that make it must have run. `finish` waits for the writes and raises their
        errors."""
        if not raw.is_cuda:
            _write_all(descriptor, _bytes_of(raw), offset)
            return
        self._threads = self._threads or ThreadPoolExecutor(_THREADS, "write")
        step = _step(raw.numel())
        for begin in range(0, raw.numel(), step):
            while not self._slots.acquire(timeout=1.0):
                self._still_wanted()
            piece = raw[begin : begin + step]
            self._under_way.append(self._threads.submit(self._write, descriptor, piece, offset + begin))

    def finish(self) -> None:
        for each in self._under_way:
            each.result()

    def close(self) -> None:
        """Stop: nothing is written after this."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _write(self, descriptor: int, piece: Tensor, offset: int) -> None:
        try:
            buffer, stream = _pinned.mine(piece.device)
            with torch.cuda.stream(stream):
                buffer[: piece.numel()].copy_(piece, non_blocking=True)
            stream.synchronize()
            _write_all(descriptor, _bytes_of(buffer)[: piece.numel()], offset)
        finally:
            self._slots.release()


class _PinnedBuffers(threading.local):
    """A thread's pinned buffer, and its stream."""

    def __init__(self) -> None:
        self._made: dict[torch.device, tuple[Tensor, torch.cuda.Stream]] = {}

    def mine(self, device: torch.device) -> tuple[Tensor, torch.cuda.Stream]:
        if device not in self._made:
            buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            self._made[device] = buffer, torch.cuda.Stream(device)
        return self._made[device]


_pinned = _PinnedBuffers()


def _step(size: int) -> int:
    """Return the size of a piece: one for every thread, if that is neither too small nor larger than its buffer."""
    return min(_PIECE_BYTES, max(_LEAST_BYTES, -(-size // _THREADS)))


def _bytes_of(raw: Tensor) -> memoryview:
    array: Any = raw.numpy()
    return memoryview(array)


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
