"""What a module consists of, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from tandem.errors import CheckpointError, SyncError


def live_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones once. Buffers too: a rotary table that differs is another model."""
    return chain(module.named_parameters(), module.named_buffers())


def whereabouts(tensor: Tensor) -> str:
    """Which memory of this process it is, and how it is read."""
    return f"{tensor.data_ptr():x} {list(tensor.shape)} {list(tensor.stride())} {tensor.dtype}"


def move_in(ours: Iterable[tuple[str, Tensor]], storage: Mapping[str, Tensor]) -> None:
    """Every tensor that `storage` has memory for continues there, with the value that it has."""
    for name, tensor in ours:
        if (home := storage.get(name)) is None:
            continue
        if (home.shape, home.dtype) != (tensor.shape, tensor.dtype):
            theirs = f"{home.dtype} {list(home.shape)}"
            raise SyncError(f"'{name}' is {tensor.dtype} {list(tensor.shape)}, the memory offered for it {theirs}")
        home.copy_(tensor.detach())
        tensor.data = home


def check_alike(ours: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    """Before anything is copied: copying would broadcast shapes and cast types without a word."""
    if odd := sorted(ours.keys() ^ saved.keys()):
        raise CheckpointError(f"{what}: {len(odd)} entries are on one side only, as '{odd[0]}'")
    for name, tensor in ours.items():
        if (tensor.shape, tensor.dtype) != (saved[name].shape, saved[name].dtype):
            theirs = f"{saved[name].dtype} {list(saved[name].shape)}"
            raise CheckpointError(f"{what}: '{name}' is {theirs} there and {tensor.dtype} {list(tensor.shape)} here")
