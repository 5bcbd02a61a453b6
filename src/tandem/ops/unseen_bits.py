"""Give 16-bit weights that are to be trained the lower 16 bits that they lack.

A weight of a bf16 checkpoint stands in the middle of the values that round to it. With zeros for lower bits none of
its updates shows before they have moved it by half a step of bf16, which may take as long as all of a training does at
the learning rates of RL. So each begins somewhere between. No weight that computes is changed by that; and of those
that are pushed the same way, some show it after each update, as large a share as the way that they have gone. The
place is a hash of the parameter's name and the element's row and column, so ranks that hold pieces have the bits of
one that holds all.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

from tandem.ops.parts import Box, box_of_rank

AT_ONCE = 1 << 22
"""Numbers whose bits are made at a time."""
_LOW = 0xFFFF
_GOLDEN, _MIX_1, _MIX_2 = -0x61C88647, -0x7A143595, -0x3D4D51CB  # of 32 bits: the golden ratio's, and Murmur's


def with_unseen_bits(name: str, exact: Tensor, box: Box | None = None) -> Tensor:
    """Return `exact`, in float32, with such bits where a number has none and is not 0. All of them round as before.
    `box`: which part of the parameter this is; without it, all."""
    top, bottom, left, right = box or box_of_rank(exact.shape, 0, 1)
    key = crc32(name.encode()) - (1 << 31)
    row_R = _mixed(_counted(top, bottom, exact.device) * _GOLDEN ^ key)
    column_C = _mixed(_counted(left, right, exact.device) * _GOLDEN ^ ~key)
    bits_RC = exact.contiguous().view(torch.int32).reshape(bottom - top, right - left).clone()
    rows = max(1, AT_ONCE // max(1, right - left))
    for start in range(0, bottom - top, rows):
        part = bits_RC[start : start + rows]
        place = (_mixed(row_R[start : start + rows, None] ^ column_C) & _LOW) - (_LOW >> 1)
        part += place.clamp_(max=_LOW >> 1) * ((part & _LOW == 0) & (part << 1 != 0))
    return bits_RC.view(torch.float32).reshape(exact.shape)


def _counted(first: int, end: int, device: torch.device) -> Tensor:
    return torch.arange(first, end, dtype=torch.int32, device=device)


def _mixed(at: Tensor) -> Tensor:
    at = (at ^ (at >> 16 & 0xFFFF)) * _MIX_1
    at = (at ^ (at >> 13 & 0x7FFFF)) * _MIX_2
    return at ^ (at >> 16 & 0xFFFF)
