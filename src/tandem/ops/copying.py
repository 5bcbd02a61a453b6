"""Many copies as few launches: of small tensors, a launch each takes longer than the bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_foreach_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_SMALL_BYTES = 2**20  # a larger one is sooner copied by itself, at the memory's own speed


@torch.no_grad()
def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Into the first of each pair the second's values. No two pairs write to one place."""
    small: defaultdict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for into, source in pairs:
        if into.is_cuda and into.nbytes <= _SMALL_BYTES:
            targets, sources = small[into.device, source.device, into.dtype, source.dtype]
            targets.append(into)
            sources.append(source)
        else:
            into.copy_(source)
    for targets, sources in small.values():
        _foreach_copy(targets, sources)


@torch.no_grad()
def cast_all(tensors: Iterable[tuple[str, Tensor, torch.dtype]]) -> list[tuple[str, Tensor]]:
    """Each in that type; what is of it already, or of no such kind, as it is."""
    found: list[tuple[str, Tensor]] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, tensor, dtype in tensors:
        cast = tensor
        if tensor.dtype != dtype and tensor.is_floating_point() and dtype.is_floating_point:
            cast = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
            pairs.append((cast, tensor))
        found.append((name, cast))
    copy_all(pairs)
    return found
