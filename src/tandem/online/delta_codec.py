"""Changed elements as bytes, and back: by places and steps where few changed, by their bits where most did.

Elements are compared and moved as the integers that their bits are. A step is the difference of two of them: of a bf16
weight that an optimizer nudged, almost always 1 up or down. Steps are added going forward and subtracted going back;
bits are flipped either way. So one piece serves both ways, and its cost grows with what changed, not with the model.

Small weights change more often, and places kept for each exponent apart would take a quarter less (docs/LOG.md). But
who goes back does not have those exponents, and to find the elements of one is a look at all.

Shapes: N elements, P parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor

from tandem.online import bit_planes
from tandem.online.bit_planes import Planes
from tandem.ops import digest

UNKNOWN = -1
"""Stands for the digest of a tensor that changed so much that it is computed again, once, after the last update."""

_PART = 1 << 22  # elements compared at a time
_PIECE = 3 << 20  # elements coded at a time, and up to a part more
_MOST = 2 / 3  # of a part's elements changed: then all are coded
_FEW = 1 / 64  # of a tensor's elements: so many at most have their digest followed one by one
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # of 8 bytes: two of 4, as digests have it
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class DeltaPiece:
    coded: Literal["some", "all"]
    parts: Sequence[tuple[str, int, int]]
    """Tensor, the element that it begins at, how many are coded."""
    sizes: Mapping[str, int]
    raw: Tensor
    """Its planes, on the host."""

    @property
    def count(self) -> int:
        return sum(count for _, _, count in self.parts)

    def planes_on(self, device: torch.device) -> Planes:
        return bit_planes.apart(self.sizes, self.raw.to(device))


@dataclass(slots=True)
class Lot:
    """What becomes a piece."""

    coded: Literal["some", "all"]
    names: list[str]
    starts: list[int]
    index_N: list[Tensor]
    """Where, counted from the part's start; of parts that are coded wholly, nothing."""
    change_N: list[Tensor]
    """By how much; of parts that are coded wholly, which bits."""

    @property
    def count(self) -> int:
        return sum(len(each) for each in self.change_N)


def side_by_side(before: Tensor, after: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Integers of both, so many at a time, on the later one's device."""
    old, new = integers(before), integers(after)
    for start in range(0, new.numel(), _PART):
        now_N = new[start : start + _PART]
        yield start, old[start : start + _PART].to(now_N.device), now_N


def integers(tensor: Tensor) -> Tensor:
    """The bits of its elements, in one row: its own memory, if that is in one piece."""
    return tensor.detach().reshape(-1).view(_INTEGER[tensor.element_size()])


def lots(before: Mapping[str, Tensor], after: Mapping[str, Tensor], changed: list[int]) -> Iterator[Lot]:
    """Everything that changed; `changed` collects how many elements."""
    some, most = Lot("some", [], [], [], []), Lot("all", [], [], [], [])
    for name in sorted(after):
        for start, then_N, now_N in side_by_side(before[name], after[name]):
            index_N = (then_N != now_N).nonzero().squeeze(1)
            if not len(index_N):
                continue
            changed.append(len(index_N))
            lot = most if len(index_N) > _MOST * len(now_N) else some
            lot.names.append(name)
            lot.starts.append(start)
            lot.index_N.append(index_N if lot is some else index_N[:0])
            lot.change_N.append(now_N[index_N] - then_N[index_N] if lot is some else _differing(then_N, now_N))
            if lot.count >= _PIECE:
                yield lot
                some, most = (Lot("some", [], [], [], []), most) if lot is some else (some, Lot("all", [], [], [], []))
    yield from (lot for lot in (some, most) if lot.names)


def _differing(then_N: Tensor, now_N: Tensor) -> Tensor:
    wide_N = (then_N ^ now_N).to(torch.int32)
    return wide_N if then_N.element_size() == 4 else wide_N & ((1 << 8 * then_N.element_size()) - 1)


def coded(lot: Lot) -> DeltaPiece:
    counts = [len(each) for each in lot.change_N]
    parts = list(zip(lot.names, lot.starts, counts, strict=True))
    change_N = torch.cat([each.to(torch.int64) for each in lot.change_N])
    if lot.coded == "all":
        found = bit_planes.words("bits", change_N, levels=1)  # of every element: parted again it is read for longer
    else:
        gap_N = torch.cat([torch.diff(index_N, prepend=index_N.new_tensor([-1])) for index_N in lot.index_N])
        found = bit_planes.rising("at", gap_N.cumsum(0)) | bit_planes.words("size", change_N.abs() - 1)
        found["sign"] = bit_planes.bits(change_N < 0)
    return DeltaPiece(lot.coded, parts, *bit_planes.together(found))


def move(
    piece: DeltaPiece, ready: Planes, tensors: Mapping[str, Tensor], numbers: dict[str, int], *, forward: bool
) -> None:
    """`ready`: its planes, where the tensors are. `numbers` go along, or become UNKNOWN."""
    if piece.coded == "all":
        return _flip(piece, ready, tensors, numbers)
    device = tensors[piece.parts[0][0]].device
    counts = [count for _, _, count in piece.parts]
    at_N = bit_planes.read_rising(ready, "at", device)
    at_N += _offsets(piece, at_N, counts)
    by_N = bit_planes.read_words(ready, "size", piece.count, device).add_(
        1
    )  # it wraps, and so does what it is added to
    down_N = bit_planes.read_bits(ready["sign"], piece.count).to(torch.int8)
    by_N.mul_(down_N.mul_(-2).add_(1) if forward else down_N.mul_(2).sub_(1))
    changes: list[digest.ElementChange] = []
    runs = [(name, sum(count for *_, count in run)) for name, run in groupby(piece.parts, itemgetter(0))]
    lengths = [count for _, count in runs]
    for (name, count), index_N, step_N in zip(runs, at_N.split(lengths), by_N.split(lengths), strict=True):
        found = integers(tensors[name])
        step_N = step_N.to(found.dtype)
        if count > _FEW * found.numel():
            numbers[name] = UNKNOWN
        if numbers[name] == UNKNOWN:
            found.index_add_(0, index_N, step_N)
        else:
            old_N = found[index_N]
            new_N = old_N + step_N
            found.index_copy_(0, index_N, new_N)
            changes.append(digest.ElementChange(name, _num_cols(tensors[name]), index_N, old_N, new_N))
        _write_back(tensors[name], found)
    followed = [change for change in changes if numbers[change.name] != UNKNOWN]
    for change, moved in zip(followed, digest.changes(followed), strict=True):
        numbers[change.name] = (numbers[change.name] + moved) & _MASK


def _offsets(piece: DeltaPiece, passed_N: Tensor, counts: list[int]) -> Tensor:
    """What turns a position counted through all parts into one in its tensor. All at once: on a GPU a launch for each
    of hundreds of parts takes longer than what it does."""
    first = torch.tensor([0, *accumulate(counts[:-1])], device=passed_N.device)
    by_P = torch.tensor([start - 1 for _, start, _ in piece.parts], device=passed_N.device)
    by_P[1:] -= passed_N[first[1:] - 1]
    offset_N = torch.zeros_like(passed_N)
    offset_N[first] = by_P.diff(prepend=by_P.new_zeros(1))
    return offset_N.cumsum_(0)


def _flip(piece: DeltaPiece, ready: Planes, tensors: Mapping[str, Tensor], numbers: dict[str, int]) -> None:
    device = tensors[piece.parts[0][0]].device
    bits_N = bit_planes.read_words(ready, "bits", piece.count, device)
    at = 0
    for name, start, count in piece.parts:
        found = integers(tensors[name])
        found[start : start + count] ^= bits_N[at : at + count].to(found.dtype)
        _write_back(tensors[name], found)
        numbers[name] = UNKNOWN
        at += count


def _write_back(tensor: Tensor, found: Tensor) -> None:
    if not tensor.is_contiguous():  # what was written to is a copy
        tensor.copy_(found.view(tensor.dtype).view(tensor.shape))


def _num_cols(tensor: Tensor) -> int:
    """As digests count them."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return tensor.numel() * (2 if tensor.element_size() == 8 else 1) // max(1, rows)
