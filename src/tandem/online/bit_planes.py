"""Columns of integers as planes of bits, which a GPU writes and reads at the speed of its memory.

Positions are kept as Elias and Fano keep them: their low bits as they are, and the rest as bits of which the i-th that
is set stands at its number plus i. Other columns as so many low bits of each as pays, and of the few that are larger,
where they are and what lies over. Huffman codes of gaps would be shorter by a fourteenth, and one core reads 170 MB/s
of them: less than what changes when ten versions of 1.7B weights are taken back in a second.

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
"""Bytes by what they hold: `at.low5`, 5 bits each; `at.high1000-2300`, 2300 bits of which 1000 are set."""

_NAMED = 200  # bits of a file's head that name a plane


def together(planes: Planes) -> tuple[dict[str, int], Tensor]:
    """The size of each, and all of them behind each other on the host."""
    return {name: plane.numel() for name, plane in planes.items()}, torch.cat(list(planes.values())).cpu()


def apart(sizes: Mapping[str, int], raw: Tensor) -> dict[str, Tensor]:
    if raw.numel() != (size := sum(sizes.values())):
        raise CheckpointDamaged(f"planes of {size} bytes in all have {raw.numel()}")
    return dict(zip(sizes, raw.split(list(sizes.values())), strict=True))


def words(column: str, words_N: Tensor, levels: int = 2) -> dict[str, Tensor]:
    """Of 32 bits each. `levels`: how often what lies over is parted again; then all of it is kept."""
    words_N = words_N.to(torch.int64) & 0xFFFFFFFF
    width = _width(words_N, levels)
    found = {f"{column}.low{width}": _low(words_N, width)} if width else {}
    over_N = words_N >> width
    where_K = over_N.nonzero().squeeze(1)
    if len(where_K):
        found |= rising(f"{column}.at", where_K) | words(f"{column}.over", over_N[where_K] - 1, levels - 1)
    return found


def read_words(planes: Planes, column: str, count: int, device: torch.device) -> Tensor:
    low, width, _ = _find(planes, f"{column}.low")
    words_N = _read_low(low, width, count, device)
    if any(name.startswith(f"{column}.at.") for name in planes):
        where_K = read_rising(planes, f"{column}.at", device)
        over_K = read_words(planes, f"{column}.over", len(where_K), device)
        words_N.index_add_(0, where_K, (over_K + 1) << width)
    return words_N


def rising(column: str, at_N: Tensor) -> dict[str, Tensor]:
    """Of positions, each larger than the one before; at least one."""
    count, most = len(at_N), int(at_N[-1])
    width = min(range(most.bit_length() + 1), key=lambda width: width * count + (most >> width))
    set_N = (at_N >> width) + torch.arange(count, device=at_N.device)
    high_B = torch.zeros(int(set_N[-1]) + 1, dtype=torch.uint8, device=at_N.device).index_fill_(0, set_N, 1)
    found = {f"{column}.high{count}-{len(high_B)}": bits(high_B)}
    return found | ({f"{column}.low{width}": _low(at_N, width)} if width else {})


def read_rising(planes: Planes, column: str, device: torch.device) -> Tensor:
    low, width, _ = _find(planes, f"{column}.low")
    high, count, length = _find(planes, f"{column}.high")
    if high is None:
        raise CheckpointDamaged(f"the plane '{column}.high' is missing")
    at_N = torch.nonzero_static(read_bits(high, length), size=count).squeeze(1)
    at_N -= torch.arange(count, device=device)
    return at_N if low is None else at_N.bitwise_left_shift_(width).bitwise_or_(_read_low(low, width, count, device))


def bits(set_N: Tensor) -> Tensor:
    """Of truths, or of integers that are 0 or 1: 8 to a byte."""
    return _tight(set_N, 1)


def read_bits(plane: Tensor, count: int) -> Tensor:
    """0 or 1 each."""
    return _loose(plane, 1, count)


def _width(words_N: Tensor, levels: int) -> int:
    """How many low bits of each make it shortest."""
    by_length = torch.bincount(torch.frexp(words_N.double()).exponent, minlength=33).tolist()
    most = max(length for length, many in enumerate(by_length) if many)

    def cost(width: int) -> float:
        if not (large := sum(by_length[width + 1 :])):
            return width * len(words_N)
        places = large * (2 + math.log2(len(words_N) / large))
        over = (many * (length + 1 if levels > 1 else most) for length, many in enumerate(by_length) if length > width)
        return width * (len(words_N) - large) + places + sum(over) + _NAMED

    return min(range(most + 1), key=cost) if levels else most


def _low(words_N: Tensor, width: int) -> Tensor:
    """Whole bytes, one after the other, and the bits that are left."""
    return torch.cat([_tight(words_N >> bit, min(8, width - bit)) for bit in range(0, width, 8)])


def _read_low(low: Tensor | None, width: int, count: int, device: torch.device) -> Tensor:
    bytes_N4 = torch.zeros(count, 4, dtype=torch.uint8, device=device)
    if low is not None:
        widths = [min(8, width - bit) for bit in range(0, width, 8)]
        sizes = [_size(each, count) for each in widths]
        if low.numel() != sum(sizes):
            raise CheckpointDamaged(f"a plane of {count} times {width} bits has {low.numel()} bytes")
        for index, (each, plane) in enumerate(zip(widths, low.split(sizes), strict=True)):
            bytes_N4[:, index] = _loose(plane, each, count)
    return bytes_N4.view(torch.int32).squeeze(1)


def _size(width: int, count: int) -> int:
    return count if width == 8 else width * -(-count // 8)


def _room(width: int) -> torch.dtype:
    """Of eight times so many bits."""
    return torch.uint8 if width == 1 else torch.int16 if width == 2 else torch.int32 if width <= 4 else torch.int64


def _tight(words_N: Tensor, width: int) -> Tensor:
    """The low bits of each, at most 8: those of eight in as many bytes."""
    if width == 8:
        return words_N.to(torch.uint8)
    room = _room(width)
    eights = torch.nn.functional.pad((words_N & (1 << width) - 1).to(room), (0, -len(words_N) % 8)).view(-1, 8)
    filled = (eights << _shifts(width, room, words_N.device)).sum(1, keepdim=True, dtype=room)
    return filled.view(torch.uint8)[:, :width].flatten()


def _loose(plane: Tensor, width: int, count: int) -> Tensor:
    if plane.numel() != _size(width, count):
        raise CheckpointDamaged(f"a plane of {count} times {width} bits has {plane.numel()} bytes")
    if width == 8:
        return plane
    room = _room(width)
    # Padding copies, also where there is nothing to pad: what is viewed begins at a multiple of its width.
    filled = torch.nn.functional.pad(plane.view(-1, width), (0, room.itemsize - width)).view(room)
    return ((filled >> _shifts(width, room, plane.device)) & (1 << width) - 1).flatten()[:count]


@cache
def _shifts(width: int, room: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(0, 8 * width, width, dtype=room, device=device)


def _find(planes: Planes, name: str) -> tuple[Tensor | None, int, int]:
    """And the numbers at the end of its name."""
    for key, plane in planes.items():
        if key.startswith(name):
            first, _, second = key[len(name) :].partition("-")
            return plane, int(first), int(second or 0)
    return None, 0, 0
