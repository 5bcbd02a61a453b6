"""A 64-bit digest of a tensor that slices and shards can be summed to.

Every element's bits, read as a number, are multiplied by a weight that depends on the tensor's name and the element's
row and column, and summed modulo 2**64. So a permutation, a transposition, a flipped bit or a shard in the wrong place
changes the sum, and disjoint pieces of a tensor sum to the digest of the whole, in whatever layout they are served: a
slice of a fused projection, a tensor-parallel shard. It guards against accidents, not against forgers.

The first dimension counts as rows, all others together as columns; a vector is one column.
Shapes: R rows, C columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_MASK = 2**64 - 1
_CHUNK = {"cpu": 2**18}  # elements widened to 64 bits at a time: on a CPU they should stay in its cache
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def piece(tensor: Tensor, name: str, row_start: int = 0, col_start: int = 0) -> int:
    """Of the part of tensor `name` that begins at this row and column."""
    if tensor.numel() == 0:
        return 0
    values_RC = tensor.detach().reshape(tensor.shape[0] if tensor.ndim else 1, -1)
    if values_RC.element_size() == 8:
        # As two columns each: multiplied by an odd weight, the top one of 64 bits stays where it is, and two flipped
        # signs would cancel.
        values_RC, col_start = values_RC.contiguous().view(torch.int32), 2 * col_start
    width = values_RC.element_size()
    integers_RC = values_RC.view(_AS_INTEGER[width])
    num_rows, num_cols = values_RC.shape
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
    cols_C = _weights(seed, col_start, num_cols, tensor.device)
    rows_R = _weights(~seed & _MASK, row_start, num_rows, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = max(1, _CHUNK.get(tensor.device.type, 2**26) // num_cols)
    for start in range(0, num_rows, step):
        wide_RC = integers_RC[start : start + step].to(torch.int64)
        wide_RC &= (1 << 8 * width) - 1  # without a sign: -1 and 1 must not be each other's negation
        total += (wide_RC.mul_(cols_C).sum(1) * rows_R[start : start + step]).sum()
    return int(total.item()) & _MASK


def combine(pieces: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The digests of whole tensors, from those of disjoint pieces."""
    whole: dict[str, int] = {}
    for name, digest in pieces:
        whole[name] = (whole.get(name, 0) + digest) & _MASK
    return whole


def digests(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, int]]:
    return ((name, piece(tensor, name)) for name, tensor in tensors)


def _weights(seed: int, start: int, count: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers: splitmix64 of the position, begun at the seed."""
    at = torch.arange(start, start + count, dtype=torch.int64, device=device)
    z = at * _GOLDEN + (seed - 2**64 if seed >= 2**63 else seed)
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return (z ^ ((z >> 31) & (2**33 - 1))) | 1


_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # splitmix64's, signed
