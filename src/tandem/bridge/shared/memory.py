"""Share memory on a CPU between two processes, with handles as plain data.

A segment is an anonymous file: it has no path, and it is gone when both processes are. Its first page has the name of
the connection and the version that was announced last. A handle names the owner's process and descriptor. If that
descriptor was reused for another file, the name in the file does not match, and the handle is refused.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.ops import digest

_PAGE, _ALIGNED = 4096, 64
_HEADER = struct.Struct("<8s32sq")  # magic, name of the connection ("meeting" in links), version
_MAGIC = b"tandem01"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the type's name; empty if it cannot be shared."""
    return _NAMES.get(dtype, "")


def _described(tensor: Tensor, offset: int) -> dict[str, Any]:
    """Return a tensor's entry in a handle, at this offset in bytes."""
    stride = list(tensor.stride())
    return {"offset": offset, "shape": list(tensor.shape), "stride": stride, "dtype": dtype_name(tensor.dtype)}


class Segment:
    """Tensors by name in one shared mapping."""

    def __init__(self, buffer: mmap.mmap, handle: Mapping[str, Any]) -> None:
        self.handle = handle
        self._buffer = buffer
        self._bytes = torch.frombuffer(buffer, dtype=torch.uint8)
        self.tensors = {name: self._view(name, place) for name, place in handle["tensors"].items()}

    @classmethod
    def create(cls, meeting: str, tensors: Mapping[str, Tensor]) -> Segment:
        places: dict[str, Any] = {}
        end = _PAGE
        for name, tensor in tensors.items():
            if tensor.dtype not in _NAMES:
                raise SyncError(f"shared memory: '{name}' is {tensor.dtype}, which cannot be shared")
            places[name] = _described(tensor.contiguous(), end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
        descriptor = os.memfd_create("tandem-weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, end)
        buffer = mmap.mmap(descriptor, end)
        buffer[: _HEADER.size] = _HEADER.pack(_MAGIC, meeting.encode(), -1)
        handle = {"pid": os.getpid(), "fd": descriptor, "size": end, "meeting": meeting, "tensors": places}
        return cls(buffer, handle)

    @classmethod
    def open(cls, handle: Mapping[str, Any]) -> Segment:
        """Map the segment of a handle. SyncError if the owner is gone, or the handle does not fit the memory."""
        try:
            pid, number, size = int(handle["pid"]), int(handle["fd"]), int(handle["size"])
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except (KeyError, TypeError, ValueError) as error:
            raise SyncError(f"shared memory: its handle is damaged: {error!r}") from error
        except OSError as error:
            raise SyncError(
                f"shared memory: that of process {handle['pid']} cannot be opened: {error.strerror}; "
                "trainer and engine must be processes of one user on one machine"
            ) from error
        try:
            found = os.fstat(descriptor).st_size
            if found != size or size < _PAGE:
                raise SyncError(f"shared memory: its handle says {size} bytes, and there are {found}")
            buffer = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        magic, meeting, _ = _HEADER.unpack_from(buffer)
        if magic != _MAGIC or meeting != str(handle["meeting"]).encode():
            raise SyncError("shared memory: it belongs to another connection; its owner was restarted since")
        return cls(buffer, handle)

    @property
    def version(self) -> int:
        """The version that was announced last."""
        return _HEADER.unpack_from(self._buffer)[2]

    def announce(self, version: int) -> None:
        struct.pack_into("<q", self._buffer, _HEADER.size - 8, version)

    def place(self, tensor: Tensor) -> str:
        """Return where in this memory the tensor is, in a form that both processes compute alike; empty if
        elsewhere."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() != self._bytes.data_ptr():
            return ""
        offset = tensor.storage_offset() * tensor.element_size()
        return f"{offset:x} {list(tensor.shape)} {list(tensor.stride())} {dtype_name(tensor.dtype)}"

    def lend(self, tensors: Mapping[str, Tensor]) -> None:
        """Name these views of this memory in the handle, in place of what it has now."""
        places = {
            name: _described(tensor, int(tensor.storage_offset()) * tensor.element_size())
            for name, tensor in tensors.items()
        }
        self.handle = {**self.handle, "tensors": places}
        self.tensors = {name: self._view(name, place) for name, place in places.items()}

    def close(self) -> None:
        """Close the owner's descriptor. The mapping stays as long as a tensor uses it."""
        if self.handle["pid"] == os.getpid():
            os.close(self.handle["fd"])

    def _view(self, name: str, place: Mapping[str, Any]) -> Tensor:
        try:
            offset, shape, stride = int(place["offset"]), [*map(int, place["shape"])], [*map(int, place["stride"])]
            dtype = DTYPES[place["dtype"]]
            steps = [(length - 1) * step for length, step in zip(shape, stride, strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise SyncError(f"shared memory: the handle of '{name}' is damaged: {error!r}") from error
        size_bytes = (sum(steps) + 1 if all(shape) else 0) * dtype.itemsize
        inside = offset >= _PAGE and offset + size_bytes <= len(self._bytes) and min([0, *shape, *stride]) == 0
        if not inside or offset % dtype.itemsize:
            raise SyncError(f"shared memory: the handle of '{name}' reaches outside it")
        return self._bytes[offset : offset + size_bytes].view(dtype).as_strided(shape, stride)


def with_digests(places: Mapping[str, str], numbers: Sequence[int]) -> dict[str, str]:
    """Return for each tensor its place in memory and the digest of its content."""
    return {
        name: f"{place} {digest.text(number)}" for (name, place), number in zip(places.items(), numbers, strict=True)
    }
