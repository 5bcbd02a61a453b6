"""Share GPU memory between two processes by CUDA IPC, with handles as plain data.

The owner exports each allocation once; tensors, fused ones too, are views of allocations. The other process must see
the same device, under any number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.shared.memory import DTYPES, dtype_name
from tandem.errors import SyncError
from tandem.ops.device_names import device_name

_PARTS = ("handle", "size", "offset", "counter", "counter_offset", "event", "event_needed")
_NOT_SHARABLE = (
    "memory of expandable segments cannot be shared (PYTORCH_CUDA_ALLOC_CONF), nor that of an engine that may sleep"
)


def export(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return handles of the memory of `tensors`, and where in it each tensor is."""
    device = next(iter(tensors.values())).device
    storages = numbers(tensors)
    handles: dict[int, dict[str, Any]] = {}
    places: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor.device != device or not dtype_name(tensor.dtype):
            raise SyncError(f"shared memory: '{name}' is {tensor.dtype} on {tensor.device}; that cannot be shared")
        storage = tensor.untyped_storage()
        number = storages[storage.data_ptr()]
        if number not in handles:
            handles[number] = _handle(name, storage)
        places[name] = {
            "storage": number,
            "offset": tensor.storage_offset(),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "dtype": dtype_name(tensor.dtype),
        }
    return {"device": device_name(device), "storages": [handles[n] for n in range(len(handles))], "tensors": places}


def numbers(tensors: Mapping[str, Tensor]) -> dict[int, int]:
    """Number the allocations of `tensors` by address, in order of appearance."""
    found: dict[int, int] = {}
    for tensor in tensors.values():
        found.setdefault(tensor.untyped_storage().data_ptr(), len(found))
    return found


def place(tensor: Tensor, numbers: Mapping[int, int]) -> str:
    """Return where in that memory the tensor is, in a form that both processes compute alike; empty if elsewhere."""
    number = numbers.get(tensor.untyped_storage().data_ptr())
    if number is None:
        return ""
    where = f"{number}:{tensor.storage_offset():x}"
    return f"{where} {list(tensor.shape)} {list(tensor.stride())} {dtype_name(tensor.dtype)}"


class Mapped:
    """Tensors of another process, mapped here."""

    def __init__(self, exported: Mapping[str, Any]) -> None:
        try:
            device = _find(str(exported["device"]))
            storages = [_open(device, handle) for handle in exported["storages"]]
            self.tensors = {name: _view(name, at, storages) for name, at in exported["tensors"].items()}
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise SyncError(f"shared memory: it cannot be mapped: {error!r}; {_NOT_SHARABLE}") from error
        self._numbers = {storage.data_ptr(): number for number, storage in enumerate(storages)}

    def place(self, tensor: Tensor) -> str:
        return place(tensor, self._numbers)


def _handle(name: str, storage: torch.UntypedStorage) -> dict[str, Any]:
    try:
        _, *parts = storage._share_cuda_()
    except RuntimeError as error:
        raise SyncError(f"shared memory: that of '{name}' cannot be exported: {error}; {_NOT_SHARABLE}") from error
    return {key: part.hex() if isinstance(part, bytes) else part for key, part in zip(_PARTS, parts, strict=True)}


def _open(device: int, handle: Mapping[str, Any]) -> torch.UntypedStorage:
    parts = [bytes.fromhex(handle[part]) if isinstance(handle[part], str) else handle[part] for part in _PARTS]
    return torch.UntypedStorage._new_shared_cuda(device, *parts)


def _view(name: str, at: Mapping[str, Any], storages: list[torch.UntypedStorage]) -> Tensor:
    storage, dtype = storages[int(at["storage"])], DTYPES[at["dtype"]]
    offset, shape, stride = int(at["offset"]), [*map(int, at["shape"])], [*map(int, at["stride"])]
    reach = sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) + 1 if all(shape) else 0
    if min([0, offset, *shape, *stride]) < 0 or (offset + reach) * dtype.itemsize > storage.nbytes():
        raise ValueError(f"'{name}' reaches outside the memory that was exported")
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


def _find(uuid: str) -> int:
    for number in range(torch.cuda.device_count()):
        if device_name(torch.device("cuda", number)) == uuid:
            return number
    raise SyncError(f"shared memory: it is on device {uuid}, which this process does not see")
