"""List, place, compare and copy a module's tensors by name, and find those with values that are not finite."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tandem.errors import CheckpointError, SyncError
from tandem.ops.parts import rows_and_cols


def live_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, tied ones once. With another rotary table, it would be another model."""
    return chain(module.named_parameters(), module.named_buffers())


def whereabouts(tensor: Tensor) -> str:
    """Return the address, shape, strides and type of a tensor as text."""
    return f"{tensor.data_ptr():x} {list(tensor.shape)} {list(tensor.stride())} {tensor.dtype}"


def views_of_others(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Return which of these tensors lie within another that is contiguous and larger: the other's name, and how many
    elements behind its start they begin."""
    by_storage: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        by_storage[tensor.untyped_storage().data_ptr()].append(name)
    found: dict[str, tuple[str, int]] = {}
    for names in by_storage.values():
        largest = max(names, key=lambda name: tensors[name].numel())
        whole = tensors[largest]
        for name in names:
            view = tensors[name]
            offset = int(view.storage_offset() - whole.storage_offset())
            reach = sum((length - 1) * step for length, step in zip(view.shape, view.stride(), strict=True)) + 1
            inside = offset >= 0 and offset + reach <= whole.numel() and view.dtype == whole.dtype
            if name != largest and view.numel() and whole.is_contiguous() and inside:
                found[name] = (largest, offset)
    return found


def in_blocks(tensor: Tensor, numbers: int) -> Tensor:
    """Return a tensor as a matrix whose rows are blocks of so many numbers of its own rows; or its rows, if blocks do
    not fill them."""
    rows, cols = rows_and_cols(tensor.shape)
    return tensor.reshape(-1, numbers) if numbers and cols % numbers == 0 else tensor.reshape(rows, cols)


def move_in(ours: Iterable[tuple[str, Tensor]], storage: Mapping[str, Tensor]) -> None:
    """Move each tensor that `storage` has memory for into that memory, with its value."""
    for name, tensor in ours:
        if (home := storage.get(name)) is None:
            continue
        if (home.shape, home.dtype) != (tensor.shape, tensor.dtype):
            theirs = f"{home.dtype} {list(home.shape)}"
            raise SyncError(f"'{name}' is {tensor.dtype} {list(tensor.shape)}, the memory offered for it {theirs}")
        home.copy_(tensor.detach())
        tensor.data = home


def stand_on(ours: Iterable[tuple[str, Tensor]], storage: Mapping[str, Tensor]) -> int:
    """Point each tensor at its memory in `storage`, which holds the same values already; nothing is written. Either all
    tensors move or, with a SyncError, none. Return the bytes of memory that `ours` no longer needs."""
    found = [(name, tensor, storage[name]) for name, tensor in ours if name in storage]
    for name, tensor, home in found:
        if tensor.requires_grad:
            raise SyncError(f"'{name}' is trained: it needs memory of its own")
        if (home.shape, home.dtype, home.device) != (tensor.shape, tensor.dtype, tensor.device):
            theirs, here = (f"{each.dtype} {list(each.shape)} on {each.device}" for each in (home, tensor))
            raise SyncError(f"'{name}' is {here}, the memory offered for it {theirs}")
    for _, tensor, home in found:
        tensor.data = home
    return sum(home.nbytes for *_, home in found)


def check_alike(ours: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    """Raise CheckpointError unless names, shapes and types agree: a copy would broadcast and cast silently."""
    if odd := sorted(ours.keys() ^ saved.keys()):
        raise CheckpointError(f"{what}: {len(odd)} entries are on one side only, as '{odd[0]}'")
    for name, tensor in ours.items():
        if (tensor.shape, tensor.dtype) != (saved[name].shape, saved[name].dtype):
            theirs = f"{saved[name].dtype} {list(saved[name].shape)}"
            raise CheckpointError(f"{what}: '{name}' is {theirs} there and {tensor.dtype} {list(tensor.shape)} here")


@torch.no_grad()
def copied_to(device: torch.device, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to a device, unless they are on it. Those that fill a memory together are copied in one piece:
    hundreds of small copies take longer than their bytes. The copies run on the current stream: wait for it before
    they are read elsewhere."""
    filled = Counter[int]()
    for tensor in tensors.values():
        filled[tensor.untyped_storage().data_ptr()] += tensor.nbytes
    wholes, found = dict[int, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if tensor.device == device or storage.nbytes() != filled[place := storage.data_ptr()]:
            found[name] = tensor.to(device, non_blocking=True)
            continue
        if (whole := wholes.get(place)) is None:
            here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            whole = wholes[place] = here.to(device, non_blocking=True)
        there = torch.empty(0, dtype=tensor.dtype, device=device)
        at = tensor.storage_offset(), tensor.shape, tensor.stride()
        found[name] = there.set_(whole.untyped_storage(), *at)  # pyright: ignore[reportArgumentType] - any storage does
    return found


class Copies:
    """Copies tensors to the host, into memory that is reused: allocating it would cost more than the copy."""

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    @torch.no_grad()
    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors. They overwrite the copies of the last call."""
        self._rooms = {
            name: self._room(name, tensor).copy_(tensor, non_blocking=True) for name, tensor in tensors.items()
        }
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return dict(self._rooms)

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        room = self._rooms.get(name)
        if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return room


class Finite:
    """Finds tensors with values that are not finite. It asks their device once, because each answer is a wait."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._bounds: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and tensor.numel():
            comparable = tensor if tensor.element_size() > 1 else tensor.float()  # 8-bit types have no minimum
            self._names.append(name)
            self._bounds.append(torch.stack(comparable.detach().aminmax()).isfinite().all())  # a NaN is its own minimum

    def odd(self) -> list[str]:
        """Return the names of tensors that hold such a value."""
        if not self._bounds:
            return []
        sound = torch.stack(self._bounds).tolist()
        return [name for name, whole in zip(self._names, sound, strict=True) if not whole]
