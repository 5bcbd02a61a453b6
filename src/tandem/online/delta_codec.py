"""Encode changed elements as bytes, and apply them: positions and steps if few changed, flipped bits if most did.

Elements are compared and changed as the integers of their bits. A step is the difference of two such integers; for a
bf16 weight that an optimizer nudged it is almost always 1 or -1. Steps are added going forward and subtracted going
backward; bits are flipped either way. So one block serves both directions, and its size grows with the change, not with
the model.

Small weights change more often, and positions stored per exponent would take a quarter less (docs/LOG.md). But going
backward those exponents are not known, and finding the elements of one exponent means reading the whole model.

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
"""The digest of a tensor with many changes: it is computed from the whole tensor, once, after the last update."""

PART = 1 << 22  # elements compared at a time
BLOCK = 3 << 20  # elements encoded at a time, and up to a part more
_MOST = 2 / 3  # of a part's elements: if more changed, all are encoded
_FEW = 1 / 64  # of a tensor's elements: if no more changed, the digest is updated from the changes alone
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # of 8 bytes: two of 4, as digests have it
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class DeltaBlock:
    """Encoded changes of some parts of tensors."""

    coded: Literal["some", "all"]
    parts: Sequence[tuple[str, int, int]]
    """Tensor, first element of the part, number of encoded elements."""
    sizes: Mapping[str, int]
    raw: Tensor
    """The planes' bytes, on the host."""

    @property
    def count(self) -> int:
        return sum(count for _, _, count in self.parts)

    def planes_on(self, device: torch.device) -> Planes:
        return bit_planes.split(self.sizes, self.raw.to(device))


@dataclass(slots=True)
class Changes:
    """Changed elements that become one block."""

    coded: Literal["some", "all"]
    names: list[str]
    starts: list[int]
    index_N: list[Tensor]
    """Positions, counted from the part's start; empty for "all"."""
    change_N: list[Tensor]
    """Steps; for "all" the bits that differ."""

    @property
    def count(self) -> int:
        return sum(len(each) for each in self.change_N)


def side_by_side(before: Tensor, after: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the integers of both tensors part by part, on the device of `after`."""
    old, new = integers(before), integers(after)
    for start in range(0, new.numel(), PART):
        now_N = new[start : start + PART]
        yield start, old[start : start + PART].to(now_N.device), now_N


def integers(tensor: Tensor) -> Tensor:
    """Return the bits of the tensor's elements as a flat tensor of integers; a view if the tensor is contiguous."""
    return tensor.detach().reshape(-1).view(_INTEGER[tensor.element_size()])


def find_changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor], changed: list[int]) -> Iterator[Changes]:
    """Yield all changes, in blocks; the digests of changed elements are appended to `changed`."""
    some, most = Changes("some", [], [], [], []), Changes("all", [], [], [], [])
    for name in sorted(after):
        for start, then_N, now_N in side_by_side(before[name], after[name]):
            index_N = (then_N != now_N).nonzero().squeeze(1)
            if not len(index_N):
                continue
            changed.append(len(index_N))
            changes = most if len(index_N) > _MOST * len(now_N) else some
            changes.names.append(name)
            changes.starts.append(start)
            changes.index_N.append(index_N if changes is some else index_N[:0])
            changes.change_N.append(now_N[index_N] - then_N[index_N] if changes is some else _differing(then_N, now_N))
            if changes.count >= BLOCK:
                yield changes
                if changes is some:
                    some = Changes("some", [], [], [], [])
                else:
                    most = Changes("all", [], [], [], [])
    yield from (changes for changes in (some, most) if changes.names)


def _differing(then_N: Tensor, now_N: Tensor) -> Tensor:
    wide_N = (then_N ^ now_N).to(torch.int32)
    return wide_N if then_N.element_size() == 4 else wide_N & ((1 << 8 * then_N.element_size()) - 1)


def encode(changes: Changes) -> DeltaBlock:
    counts = [len(each) for each in changes.change_N]
    parts = list(zip(changes.names, changes.starts, counts, strict=True))
    change_N = torch.cat([each.to(torch.int64) for each in changes.change_N])
    if changes.coded == "all":
        found = bit_planes.words("bits", change_N, levels=1)  # more levels would make reading slower
    else:
        gap_N = torch.cat([torch.diff(index_N, prepend=index_N.new_tensor([-1])) for index_N in changes.index_N])
        found = bit_planes.rising("at", gap_N.cumsum(0)) | bit_planes.words("size", change_N.abs() - 1)
        found["sign"] = bit_planes.bits(change_N < 0)
    return DeltaBlock(changes.coded, parts, *bit_planes.concatenate(found))


def apply_block(
    block: DeltaBlock, planes: Planes, tensors: Mapping[str, Tensor], digests: dict[str, int], *, forward: bool
) -> None:
    """Apply a block to the tensors. `planes`: the block's, on the tensors' device. `digests` are updated, or become
    UNKNOWN."""
    if block.coded == "all":
        return _flip(block, planes, tensors, digests)
    device = tensors[block.parts[0][0]].device
    counts = [count for _, _, count in block.parts]
    at_N = bit_planes.read_rising(planes, "at", device)
    at_N += _offsets(block, at_N, counts)
    by_N = bit_planes.read_words(planes, "size", block.count, device)
    by_N.add_(1)  # it may wrap, as does the addition to the elements
    down_N = bit_planes.read_bits(planes["sign"], block.count).to(torch.int8)
    by_N.mul_(down_N.mul_(-2).add_(1) if forward else down_N.mul_(2).sub_(1))
    element_changes: list[digest.ElementChange] = []
    runs = [(name, sum(count for *_, count in run)) for name, run in groupby(block.parts, itemgetter(0))]
    lengths = [count for _, count in runs]
    for (name, count), index_N, step_N in zip(runs, at_N.split(lengths), by_N.split(lengths), strict=True):
        found = integers(tensors[name])
        step_N = step_N.to(found.dtype)
        if count > _FEW * found.numel():
            digests[name] = UNKNOWN
        if digests[name] == UNKNOWN:
            found.index_add_(0, index_N, step_N)
        else:
            old_N = found[index_N]
            new_N = old_N + step_N
            found.index_copy_(0, index_N, new_N)
            element_changes.append(digest.ElementChange(name, _num_cols(tensors[name]), index_N, old_N, new_N))
        _write_back(tensors[name], found)
    followed = [change for change in element_changes if digests[change.name] != UNKNOWN]
    for change, moved in zip(followed, digest.changes(followed), strict=True):
        digests[change.name] = (digests[change.name] + moved) & _MASK


def _offsets(block: DeltaBlock, passed_N: Tensor, counts: list[int]) -> Tensor:
    """Return the offsets that turn positions counted through all parts into positions in their tensors. One operation
    for all parts: on a GPU hundreds of small launches would take longer than their work."""
    first = torch.tensor([0, *accumulate(counts[:-1])], device=passed_N.device)
    by_P = torch.tensor([start - 1 for _, start, _ in block.parts], device=passed_N.device)
    by_P[1:] -= passed_N[first[1:] - 1]
    offset_N = torch.zeros_like(passed_N)
    offset_N[first] = by_P.diff(prepend=by_P.new_zeros(1))
    return offset_N.cumsum_(0)


def _flip(block: DeltaBlock, planes: Planes, tensors: Mapping[str, Tensor], digests: dict[str, int]) -> None:
    device = tensors[block.parts[0][0]].device
    bits_N = bit_planes.read_words(planes, "bits", block.count, device)
    at = 0
    for name, start, count in block.parts:
        found = integers(tensors[name])
        found[start : start + count] ^= bits_N[at : at + count].to(found.dtype)
        _write_back(tensors[name], found)
        digests[name] = UNKNOWN
        at += count


def _write_back(tensor: Tensor, found: Tensor) -> None:
    if not tensor.is_contiguous():  # `integers` returned a copy
        tensor.copy_(found.view(tensor.dtype).view(tensor.shape))


def _num_cols(tensor: Tensor) -> int:
    """Return the number of columns, as ops/digest.py counts them."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return tensor.numel() * (2 if tensor.element_size() == 8 else 1) // max(1, rows)
