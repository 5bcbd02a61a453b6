"""Encode columns of integers as bit planes, which a GPU writes and reads at the speed of its memory.

Increasing positions use Elias-Fano coding: the low bits as they are, and the high parts as one bit string whose i-th
set bit is at index (high part + i). Other columns store as many low bits of each integer as pays, and for the few
larger ones their positions and high parts. Huffman codes of gaps would be shorter by a fourteenth, but one core decodes
only 170 MB/s of them: too slow to roll back ten versions of 1.7B weights in a second.

Shapes: N integers, K of them large, B bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from tandem.errors import CheckpointDamaged

Planes = Mapping[str, Tensor]
"""Bytes by name: `at.low5` has 5 bits of each integer; `at.high1000-2300` has 2300 bits, of which 1000 are set."""

_NAME_BITS = 200  # what a plane's name costs in the head of a file


def concatenate(planes: Planes) -> tuple[dict[str, int], Tensor]:
    """Return the size of each plane, and all their bytes in one tensor on the host."""
    return {name: plane.numel() for name, plane in planes.items()}, torch.cat(list(planes.values())).cpu()


def split(sizes: Mapping[str, int], raw: Tensor) -> dict[str, Tensor]:
    """Undo `concatenate`."""
    if raw.numel() != (size := sum(sizes.values())):
        raise CheckpointDamaged(f"the planes must have {size} bytes in all, but have {raw.numel()}")
    return dict(zip(sizes, raw.split(list(sizes.values())), strict=True))


def words(column: str, words_N: Tensor, levels: int = 2) -> dict[str, Tensor]:
    """Encode integers of 32 bits. `levels`: how often the high parts are split again; the last level stores all
    bits."""
    words_N = words_N.to(torch.int64) & 0xFFFFFFFF
    width = _width(words_N, levels)
    found = {f"{column}.low{width}": _low(words_N, width)} if width else {}
    high_N = words_N >> width
    where_K = high_N.nonzero().squeeze(1)
    if len(where_K):
        found |= rising(f"{column}.at", where_K) | words(f"{column}.over", high_N[where_K] - 1, levels - 1)
    return found


def read_words(planes: Planes, column: str, count: int, device: torch.device) -> Tensor:
    """Decode what `words` encoded."""
    low, width, _ = _find(planes, f"{column}.low")
    words_N = _read_low(low, width, count, device)
    if any(name.startswith(f"{column}.at.") for name in planes):
        where_K = read_rising(planes, f"{column}.at", device)
        high_K = read_words(planes, f"{column}.over", len(where_K), device)
        words_N.index_add_(0, where_K, (high_K + 1) << width)
    return words_N


def rising(column: str, at_N: Tensor) -> dict[str, Tensor]:
    """Encode positions, each larger than the one before; at least one."""
    count, most = len(at_N), int(at_N[-1])
    width = min(range(most.bit_length() + 1), key=lambda width: width * count + (most >> width))
    set_N = (at_N >> width) + torch.arange(count, device=at_N.device)
    high_B = torch.zeros(int(set_N[-1]) + 1, dtype=torch.uint8, device=at_N.device).index_fill_(0, set_N, 1)
    found = {f"{column}.high{count}-{len(high_B)}": bits(high_B)}
    return found | ({f"{column}.low{width}": _low(at_N, width)} if width else {})


def read_rising(planes: Planes, column: str, device: torch.device) -> Tensor:
    """Decode what `rising` encoded."""
    low, width, _ = _find(planes, f"{column}.low")
    high, count, length = _find(planes, f"{column}.high")
    if high is None:
        raise CheckpointDamaged(f"the plane '{column}.high' is missing")
    at_N = torch.nonzero_static(read_bits(high, length), size=count).squeeze(1)
    at_N -= torch.arange(count, device=device)
    return at_N if low is None else at_N.bitwise_left_shift_(width).bitwise_or_(_read_low(low, width, count, device))


def bits(set_N: Tensor) -> Tensor:
    """Encode booleans, or integers that are 0 or 1: 8 to a byte."""
    return _pack(set_N, 1)


def read_bits(plane: Tensor, count: int) -> Tensor:
    """Decode what `bits` encoded, as 0 or 1."""
    return _unpack(plane, 1, count)


def _width(words_N: Tensor, levels: int) -> int:
    """Return how many low bits of each integer make the encoding shortest."""
    by_length = torch.bincount(torch.frexp(words_N.double()).exponent, minlength=33).tolist()
    most = max(length for length, many in enumerate(by_length) if many)

    def cost(width: int) -> float:
        if not (large := sum(by_length[width + 1 :])):
            return width * len(words_N)
        places = large * (2 + math.log2(len(words_N) / large))
        high = (many * (length + 1 if levels > 1 else most) for length, many in enumerate(by_length) if length > width)
        return width * (len(words_N) - large) + places + sum(high) + _NAME_BITS

    return min(range(most + 1), key=cost) if levels else most


def _low(words_N: Tensor, width: int) -> Tensor:
    """Encode the low bits: first a plane of each whole byte, then one of the bits that are left."""
    return torch.cat([_pack(words_N >> bit, min(8, width - bit)) for bit in range(0, width, 8)])


def _read_low(low: Tensor | None, width: int, count: int, device: torch.device) -> Tensor:
    bytes_N4 = torch.zeros(count, 4, dtype=torch.uint8, device=device)
    if low is not None:
        widths = [min(8, width - bit) for bit in range(0, width, 8)]
        sizes = [_size(each, count) for each in widths]
        if low.numel() != sum(sizes):
            raise CheckpointDamaged(
                f"a plane of {count} times {width} bits must have {sum(sizes)} bytes, but has {low.numel()}"
            )
        for index, (each, plane) in enumerate(zip(widths, low.split(sizes), strict=True)):
            bytes_N4[:, index] = _unpack(plane, each, count)
    return bytes_N4.view(torch.int32).squeeze(1)


def _size(width: int, count: int) -> int:
    return count if width == 8 else width * -(-count // 8)


def _dtype_for(width: int) -> torch.dtype:
    """Return an integer type with room for eight values of so many bits."""
    return torch.uint8 if width == 1 else torch.int16 if width == 2 else torch.int32 if width <= 4 else torch.int64


def _pack(words_N: Tensor, width: int) -> Tensor:
    """Pack the low `width` bits of each integer, at most 8: eight integers take `width` bytes."""
    if width == 8:
        return words_N.to(torch.uint8)
    dtype = _dtype_for(width)
    eights = torch.nn.functional.pad((words_N & (1 << width) - 1).to(dtype), (0, -len(words_N) % 8)).view(-1, 8)
    filled = (eights << _shifts(width, dtype, words_N.device)).sum(1, keepdim=True, dtype=dtype)
    return filled.view(torch.uint8)[:, :width].flatten()


def _unpack(plane: Tensor, width: int, count: int) -> Tensor:
    """Undo `_pack`."""
    if plane.numel() != (size := _size(width, count)):
        raise CheckpointDamaged(
            f"a plane of {count} times {width} bits must have {size} bytes, but has {plane.numel()}"
        )
    if width == 8:
        return plane
    dtype = _dtype_for(width)
    # `pad` copies even if there is nothing to pad; so the view below starts at a multiple of its item size.
    filled = torch.nn.functional.pad(plane.view(-1, width), (0, dtype.itemsize - width)).view(dtype)
    return ((filled >> _shifts(width, dtype, plane.device)) & (1 << width) - 1).flatten()[:count]


@cache
def _shifts(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(0, 8 * width, width, dtype=dtype, device=device)


def _find(planes: Planes, name: str) -> tuple[Tensor | None, int, int]:
    """Return the plane whose name starts so, and the two numbers at the end of the name."""
    for key, plane in planes.items():
        if key.startswith(name):
            first, _, second = key[len(name) :].partition("-")
            return plane, int(first), int(second or 0)
    return None, 0, 0
