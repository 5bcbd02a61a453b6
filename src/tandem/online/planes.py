"""Columns of 32-bit words as bytes: a plane for each byte, in whichever way is short and quickly read.

Where weights changed, and by how much, are such columns. Gaps between random positions are distributed geometrically,
which Huffman codes meet within a few hundredths of a bit; runs are what deflate's run-length mode is for. Matches of
more than a byte are not looked for: there are none, and it is slow. A plane that is almost all 0, as of the higher
bytes, is kept as what is not; one that is all 0 is not kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tandem.errors import CheckpointDamaged

Planes = Mapping[str, bytes | memoryview]
"""By column and byte, and how it is kept: `gap0/z` deflated, `sign/r` as it is, `gap1/s` positions, then bytes."""
Ready = Mapping[str, Tensor]
"""By column and byte, inflated, on their device."""

_SHORTER = 0.9  # as a share, or a plane stays as it is: that is read faster
_ALMOST = 1 / 64  # at most so much of a plane that is kept as what is not 0: 5 bytes each


def words(column: str, words_N: Tensor, shorter: float = _SHORTER) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for index, plane_N in enumerate(words_N.to(torch.int32).view(torch.uint8).view(-1, 4).unbind(1)):
        where_K = plane_N.nonzero().squeeze(1)
        if len(where_K) > _ALMOST * len(plane_N):
            found |= _coded(f"{column}{index}", plane_N, shorter)
        elif len(where_K):
            found[f"{column}{index}/s"] = _bytes(where_K.to(torch.int32)) + _bytes(plane_N[where_K])
    return found


def bits(column: str, set_N: Tensor) -> dict[str, bytes]:
    """Of truths, 8 to a byte."""
    padded = torch.nn.functional.pad(set_N, (0, -len(set_N) % 8)).view(-1, 8)
    return _coded(column, (padded << torch.arange(8, device=set_N.device)).sum(1).to(torch.uint8), _SHORTER)


def ready(planes: Planes, device: torch.device) -> Ready:
    """The work of a thread: all of this lets go of the interpreter's lock."""
    try:
        return {
            name[:-2] if not name.endswith("/s") else name: torch.from_numpy(
                np.frombuffer(zlib.decompress(content, -15) if name.endswith("/z") else content, np.uint8).copy()
            ).to(device)
            for name, content in planes.items()
        }
    except zlib.error as error:
        raise CheckpointDamaged(f"a plane of {', '.join(planes)} cannot be inflated: {error}") from error


def read_words(planes: Ready, column: str, count: int, device: torch.device) -> Tensor:
    words_N4 = torch.zeros(count, 4, dtype=torch.uint8, device=device)
    for index in range(4):
        name = f"{column}{index}"
        if name in planes:
            words_N4[:, index] = _whole(planes, name, count)
        elif (sparse := planes.get(f"{name}/s")) is not None:
            where_K = sparse[: 4 * (len(sparse) // 5)].view(torch.int32).to(torch.int64)
            words_N4[:, index].index_copy_(0, where_K, sparse[4 * len(where_K) :])
    return words_N4.view(torch.int32).squeeze(1)


def read_bits(planes: Ready, column: str, count: int, device: torch.device) -> Tensor:
    plane_N = _whole(planes, column, -(-count // 8))
    spread = plane_N[:, None] >> torch.arange(8, dtype=torch.uint8, device=device)
    return (spread & 1).bool().flatten()[:count]


def _coded(name: str, plane_N: Tensor, share: float) -> dict[str, bytes]:
    content = _bytes(plane_N)
    press = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    shorter = press.compress(content) + press.flush()
    return {f"{name}/z": shorter} if len(shorter) < share * len(content) else {f"{name}/r": content}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _whole(planes: Ready, name: str, count: int) -> Tensor:
    found = planes.get(name)
    if found is None or len(found) != count:
        raise CheckpointDamaged(f"the plane '{name}' has {0 if found is None else len(found)} bytes instead of {count}")
    return found
