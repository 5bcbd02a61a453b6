"""Files of whole tensors that several ranks write together, each rank its own rows.

Rank 0 writes the header and the size (`begin`), then every rank writes its parts at their bytes (`write_parts`). The
file's bytes do not depend on how many ranks there are, and are those of `safetensors.torch.save_file`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.errors import CheckpointError
from tandem.io.safetensors_format import KNOWN, StoredTensor, header_of, read_header, width_of
from tandem.types import Part

_AT_ONCE_BYTES = 1 << 26
"""Bytes of a GPU tensor that are on the host at a time."""
_SYNC_BYTES = 1 << 30
"""Bytes between two fsyncs: syncing a large file only at the end would look like a stall."""
Rectangle = tuple[int, int, int, int]
"""First and last row, first and last column (ends excluded); columns are all dimensions but the first."""


def begin(path: Path, parts: Iterable[Part], metadata: Mapping[str, str] | None = None) -> int:
    """Write a new file's header and size; return how many bytes its tensors have. `parts`: some part of each tensor."""
    header, stored = header_of({part.name: (_name_of(part.tensor.dtype), part.full_shape) for part in parts}, metadata)
    data_bytes = sum(tensor.size_bytes for tensor in stored.values())
    with path.open("xb") as file:
        file.write(header)
        file.truncate(len(header) + data_bytes)
    return data_bytes


def write_parts(path: Path, parts: Iterable[Part], *, durable: bool = True) -> int:
    """Write `parts` into a begun file; return the number of bytes. `durable`: wait until they are on the disk."""
    # Not a memory map: on a full disk, writing to one would end the process instead of raising an error.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        stored = _header(descriptor, path)
        done = synced = 0
        for part in parts:
            done += _write(descriptor, _found(stored, part, path), part)
            if durable and done - synced > _SYNC_BYTES:
                os.fdatasync(descriptor)
                synced = done
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return done


class RowFile:
    """A file of tensors, read by rectangles."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path
        self.tensors = _header(descriptor, path)

    def read(self, name: str, rectangle: Rectangle | None = None) -> Tensor:
        """Return a tensor, or a rectangle of it, in the file's type, without reading anything else."""
        stored = self._stored(name)
        rows, columns = _matrix(stored.shape)
        top, bottom, left, right = rectangle or (0, rows, 0, columns)
        if (left, right) != (0, columns):
            shape = (bottom - top, right - left)
        else:
            shape = (bottom - top, *stored.shape[1:]) if stored.shape else ()
        found = torch.empty(shape, dtype=getattr(torch, stored.dtype))
        view = _bytes_of(found)
        for start, begin, end in _runs(stored, (top, bottom, left, right)):
            self._fill(view[start : start + end - begin], begin)
        return found

    def check(self, part: Part) -> None:
        """Raise CheckpointError unless the file has this tensor, in this type and shape."""
        _found(self.tensors, part, self._path)

    def read_part(self, part: Part) -> None:
        """Read a part into its own memory."""
        self.check(part)
        part.tensor.detach().copy_(self.read(part.name, rectangle_of(part)).view(part.tensor.shape))

    def _stored(self, name: str) -> StoredTensor:
        if (stored := self.tensors.get(name)) is None or stored.dtype not in KNOWN:
            what = "is missing" if stored is None else f"has type {stored.dtype}, which is not supported"
            raise CheckpointError(f"{self._path}: '{name}' {what}")
        return stored

    def _fill(self, view: memoryview, begin: int) -> None:
        done = 0
        while done < len(view):
            if not (count := os.preadv(self._descriptor, [view[done:]], begin + done)):
                raise CheckpointError(f"{self._path}: ends after {begin + done} bytes")
            done += count


@contextmanager
def opened(path: Path) -> Generator[RowFile]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield RowFile(descriptor, path)
    finally:
        os.close(descriptor)


def rectangle_of(part: Part) -> Rectangle:
    """Return the rectangle of a part in its tensor."""
    rows = part.tensor.shape[0] if part.tensor.ndim else 1
    columns = part.tensor.numel() // rows if rows else 0
    return part.row_start, part.row_start + rows, part.col_start, part.col_start + columns


def _write(descriptor: int, stored: StoredTensor, part: Part) -> int:
    raw = part.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    done = 0
    for start, begin, end in _runs(stored, rectangle_of(part)):
        for at in range(0, end - begin, _AT_ONCE_BYTES):
            piece = raw[start + at : min(start + at + _AT_ONCE_BYTES, start + end - begin)]
            _write_all(descriptor, _bytes_of(piece.cpu()), begin + at)
        done += end - begin
    return done


def _runs(stored: StoredTensor, rectangle: Rectangle) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of bytes of a rectangle: the offset in the rectangle's own bytes, then first and last byte in the
    file."""
    rows, columns = _matrix(stored.shape)
    top, bottom, left, right = rectangle
    if not (0 <= top <= bottom <= rows and 0 <= left <= right <= columns):
        raise CheckpointError(
            f"rows {top} to {bottom}, columns {left} to {right} are not in a tensor of {stored.shape}"
        )
    width = width_of(stored.dtype)
    length = (right - left) * width
    if (left, right) == (0, columns):  # whole rows have no gaps between them
        begin = stored.offset + top * length
        yield 0, begin, begin + (bottom - top) * length
        return
    for number, row in enumerate(range(top, bottom)):
        begin = stored.offset + (row * columns + left) * width
        yield number * length, begin, begin + length


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many rows and columns a tensor has; a scalar is one row."""
    rows = shape[0] if shape else 1
    columns = 1
    for each in shape[1:]:
        columns *= each
    return rows, columns


def _found(stored: Mapping[str, StoredTensor], part: Part, path: Path) -> StoredTensor:
    found = stored.get(part.name)
    ours = (_name_of(part.tensor.dtype), tuple(part.full_shape))
    if found is None or (found.dtype, found.shape) != ours:
        theirs = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
        raise CheckpointError(f"{path}: '{part.name}' {theirs}, and this rank holds some of {ours[0]} {list(ours[1])}")
    return found


def _header(descriptor: int, path: Path) -> dict[str, StoredTensor]:
    try:
        return read_header(descriptor, path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
