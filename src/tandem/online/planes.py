"""Columns of 32-bit words as bytes: a plane for each byte, deflated where that is shorter, left out where it is all 0.

Where weights changed, and by how much, are such columns. Gaps between random positions are distributed geometrically,
which Huffman codes meet within a few hundredths of a bit; long runs (planes that are almost all 0) are what deflate's
run-length mode is for. Matches of more than a byte are not looked for: there are none, and it is slow.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.errors import CheckpointDamaged

Planes = Mapping[str, bytes | memoryview]
"""By column and byte: `gap0/z` is deflated, `sign/r` is as it is."""

_SHORTER = 0.9  # as a share, or a plane stays as it is: that is read faster


def words(column: str, words_N: Tensor, shorter: float = _SHORTER) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for index, plane_N in enumerate(words_N.to(torch.int32).view(torch.uint8).view(-1, 4).unbind(1)):
        if bool(plane_N.any()):
            found |= _coded(f"{column}{index}", plane_N, shorter)
    return found


def bits(column: str, set_N: Tensor) -> dict[str, bytes]:
    """Of truths, 8 to a byte."""
    padded = torch.nn.functional.pad(set_N, (0, -len(set_N) % 8)).view(-1, 8)
    return _coded(column, (padded << torch.arange(8, device=set_N.device)).sum(1).to(torch.uint8), _SHORTER)


def read_words(planes: Planes, column: str, count: int, device: torch.device) -> Tensor:
    words_N4 = torch.zeros(count, 4, dtype=torch.uint8, device=device)
    for index in range(4):
        if f"{column}{index}/r" in planes:
            words_N4[:, index] = _plane(planes, f"{column}{index}", count).to(device)
    return words_N4.view(torch.int32).squeeze(1)


def read_bits(planes: Planes, column: str, count: int, device: torch.device) -> Tensor:
    plane_N = _plane(planes, column, -(-count // 8)).to(device)
    spread = plane_N[:, None] >> torch.arange(8, dtype=torch.uint8, device=device)
    return (spread & 1).bool().flatten()[:count]


def inflated(planes: Planes) -> Planes:
    """All of them as they are; the work of a thread: zlib lets go of the interpreter's lock."""
    try:
        return {
            f"{name[:-2]}/r": zlib.decompress(content, -15) if name.endswith("/z") else content
            for name, content in planes.items()
        }
    except zlib.error as error:
        raise CheckpointDamaged(f"a plane of {', '.join(planes)} cannot be inflated: {error}") from error


def _coded(name: str, plane_N: Tensor, share: float) -> dict[str, bytes]:
    content = plane_N.cpu().numpy().tobytes()
    press = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    shorter = press.compress(content) + press.flush()
    return {f"{name}/z": shorter} if len(shorter) < share * len(content) else {f"{name}/r": content}


def _plane(planes: Planes, name: str, count: int) -> Tensor:
    content = planes.get(f"{name}/r", b"")
    if len(content) != count:
        raise CheckpointDamaged(f"the plane '{name}' has {len(content)} bytes instead of {count}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
