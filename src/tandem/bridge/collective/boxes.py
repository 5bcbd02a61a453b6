"""Weights that travel as rectangles: what a rank holds, and what a receiver puts together.

Both ends follow one plan (plan.py). A rank reads its tensors twice: once for their digests, once to send them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.collective.control_channel import ControlChannel
from tandem.bridge.collective.plan import Bucket, SendPlan, make_plan
from tandem.bridge.collective.process_group import Group, Message
from tandem.bridge.common import manifest as wire
from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.held_weights import HeldWeights
from tandem.bridge.common.manifest import checksum, dtype_named, padded
from tandem.bridge.common.packer import Form
from tandem.bridge.common.places import (
    Places,
    TensorPlace,
    cut,
    from_numbers,
    matrix,
    place_of,
    sizes_of,
    to_numbers,
    whole_places,
)
from tandem.errors import SyncError
from tandem.io.bounded_json import parsed
from tandem.ops import digest
from tandem.ops.batched_launches import copy_all
from tandem.ops.parts import Box, rows_and_cols
from tandem.types import Part, Weights


class BoxTable:
    """What every rank holds and every receiver serves: from it all processes make the same plan. `held` is empty while
    rank 0 still asks."""

    def __init__(
        self, forms: Mapping[str, Form], held: Sequence[Places], served: Sequence[Places], bucket_bytes: int
    ) -> None:
        self.forms, self.held, self.served = forms, held, served
        self._bucket_bytes = bucket_bytes
        content = {"held": held, "served": served}
        lists = {key: [to_numbers(places, forms) for places in each] for key, each in content.items()}
        self.text = json.dumps({**lists, "bucket_bytes": bucket_bytes})
        self.checksum = checksum(self.text.encode())

    @classmethod
    def from_text(cls, text: str, expected: str, forms: Mapping[str, Form], mode: str) -> BoxTable:
        if checksum(text.encode()) != expected:
            raise SyncError(f"{mode}: the table of boxes is damaged: its checksum does not fit its content")
        try:
            content = parsed(text)
            held, served = ([from_numbers(each, forms) for each in content[key]] for key in ("held", "served"))
            return cls(forms, held, served, int(content["bucket_bytes"]))
        except (LookupError, TypeError, ValueError) as error:
            raise SyncError(f"{mode}: the table of boxes does not say what this release writes: {error}") from error

    @cached_property
    def plan(self) -> SendPlan:
        return make_plan(sizes_of(self.forms), self.held, self.served, self._bucket_bytes)


class BoxTables:
    """The tables of one connection, each read once."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._tables: dict[str, BoxTable] = {}

    def read(
        self, checksum: str, forms: Mapping[str, Form], channel: ControlChannel, what_failed: str, deadline: Deadline
    ) -> BoxTable:
        if checksum not in self._tables:
            text = channel.read(f"boxes/{checksum}", what_failed, deadline)
            table = BoxTable.from_text(text, checksum, forms, self._mode)
            self._tables = {**dict([*self._tables.items()][-1:]), checksum: table}
        return self._tables[checksum]


def forms_of(places: wire.Placement) -> dict[str, Form]:
    return {name: Form(entry.dtype, tuple(entry.shape)) for name, entry in places.tensors.items()}


# --- a rank's end


class SentWeights(HeldWeights):
    """A version, as far as this rank holds it; it goes as boxes."""

    @torch.no_grad()
    def send(self, plan: SendPlan, rank: int, first_receiver: int, group: Group, deadline: Deadline) -> None:
        """Send what the plan says. Each bucket is filled while the one before travels. `first_receiver`: the rank in
        the group of receiver 0."""
        failed = f"version {self._weights.version} was not taken"
        rounds = plan.rounds_of_rank(rank)
        buffers = _two_buffers(group, rounds)
        parts = _PartsInOrder(self._weights, rounds, self._what)
        under_way: list[Sequence[Any]] = [(), ()]
        for number, buckets in enumerate(rounds):
            group.await_exchange(under_way[number % 2], failed, deadline)
            at, messages, copies = 0, list[Message](), list[tuple[Tensor, Tensor]]()
            for bucket in buckets:
                raw = buffers[number % 2][at : at + bucket.size_bytes]
                at += padded(bucket.size_bytes)
                messages.append(Message(raw, first_receiver + bucket.peer))
                for place, offset in bucket.cuts:
                    into = _in_bucket(raw, place.box, offset, dtype_named(self._into[place.name].dtype))
                    copies.append((into, parts.cut(place)))
            copy_all(copies)
            parts.end_round(number)
            under_way[number % 2] = group.exchange(messages, (), deadline) if messages else ()
        for works in under_way:
            group.await_exchange(works, failed, deadline)
        group.finish(failed, deadline)


class _PartsInOrder:
    """A rank's parts, read once. Each is kept from when it comes until the last round that needs it."""

    def __init__(self, weights: Weights, rounds: Sequence[Sequence[Bucket]], what: str) -> None:
        self._parts, self._what = weights.parts(), what
        self._last_round = {
            name: number for number, buckets in enumerate(rounds) for bucket in buckets for (name, _), _ in bucket.cuts
        }
        self._kept: dict[str, Part] = {}

    def cut(self, place: TensorPlace) -> Tensor:
        while place.name not in self._kept:
            part = next(self._parts, None)
            if part is None:
                raise SyncError(f"{self._what}: {place} is not held any more, and was when its digest was taken")
            if part.name in self._last_round and part.tensor.numel():
                self._kept[part.name] = part
        part = self._kept[place.name]
        return cut(matrix(part.tensor.detach()), place_of(part).box, place.box)

    def end_round(self, number: int) -> None:
        for name in [name for name in self._kept if self._last_round[name] <= number]:
            del self._kept[name]


# --- a receiver's end


class StagedBoxes:
    """The boxes of one receiver, in one buffer."""

    def __init__(self, table: BoxTable, receiver: int, device: torch.device) -> None:
        if receiver >= len(table.served):
            raise SyncError(f"the table of boxes has {len(table.served)} receivers, and this is number {receiver}")
        self._table, self._receiver = table, receiver
        self.places, self._forms = table.served[receiver], table.forms
        places, forms = self.places, self._forms
        offsets: list[int] = []
        end = 0
        for name, box in places:
            offsets.append(padded(end))
            end = offsets[-1] + box.num_elements * dtype_named(forms[name].dtype).itemsize
        self._raw = torch.empty(end, dtype=torch.uint8, device=device)
        self._by_name: defaultdict[str, list[tuple[TensorPlace, Tensor]]] = defaultdict(list)
        for place, offset in zip(places, offsets, strict=True):
            values = _in_bucket(self._raw, place.box, offset, dtype_named(forms[place.name].dtype))
            self._by_name[place.name].append((place, values))
        self.is_whole = list(places) == whole_places(forms)
        """The receiver takes every tensor whole."""

    def parts(self) -> Iterator[Part]:
        for name, form in self._forms.items():
            for place, values in self._by_name[name]:
                shape, box = tuple(form.shape), place.box
                if shape and (box.left, box.right) == (0, rows_and_cols(shape)[1]):
                    values = values.view(box.bottom - box.top, *shape[1:])
                yield Part(name, values if shape else values.view(()), box.top, box.left, shape)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a receiver that takes them whole."""
        return ((part.name, part.tensor) for part in self.parts() if self.is_whole)

    def digests(self) -> list[int]:
        """Return the digest of each place."""
        found = [(place, values) for each in self._by_name.values() for place, values in each]
        numbers = digest.pieces((place.name, values, place.box.top, place.box.left) for place, values in found)
        by_place = dict(zip((place for place, _ in found), numbers, strict=True))
        return [by_place[place] for place in self.places]

    def check(self, expected: Sequence[str], what: str) -> None:
        """Raise SyncError unless every box is, bit for bit, what was sent. `expected`: the digest of each place."""
        found = digest.texts(self.digests())
        if len(expected) != len(found):
            raise SyncError(f"{what}: {len(expected)} digests were announced for {len(found)} boxes")
        if odd := [number for number in range(len(found)) if found[number] != expected[number]]:
            raise SyncError(
                f"{what}: what arrived of {self.places[odd[0]]} is not what was sent ({len(odd)} of {len(found)} boxes "
                f"differ); digest {found[odd[0]]} instead of {expected[odd[0]]}; it will not be served"
            )

    @torch.no_grad()
    def receive(self, group: Group, failed: str, deadline: Deadline) -> None:
        """Receive what the plan says. The next bucket travels while the one before is copied to its place."""
        rounds = self._table.plan.rounds_of_receiver(self._receiver)
        buffers = _two_buffers(group, rounds)
        before: tuple[Sequence[Any], list[tuple[Tensor, Tensor]]] = ((), [])
        for number, buckets in enumerate([*rounds, []]):
            at, messages, copies = 0, list[Message](), list[tuple[Tensor, Tensor]]()
            for bucket in buckets:
                raw = buffers[number % 2][at : at + bucket.size_bytes]
                at += padded(bucket.size_bytes)
                messages.append(Message(raw, bucket.peer))
                for place, offset in bucket.cuts:
                    dtype = dtype_named(self._forms[place.name].dtype)
                    copies.append((self._target(place), _in_bucket(raw, place.box, offset, dtype)))
            works = group.exchange((), messages, deadline) if messages else ()
            group.await_exchange(before[0], failed, deadline)
            copy_all(before[1])
            before = works, copies
        group.finish(failed, deadline)

    def _target(self, part: TensorPlace) -> Tensor:
        for place, values in self._by_name[part.name]:
            if place.box.overlap(part.box) == part.box:
                return cut(values, place.box, part.box)
        raise AssertionError(f"{part} is in no box of this receiver")


def _two_buffers(group: Group, rounds: Sequence[Sequence[Bucket]]) -> list[Tensor]:
    most = max((sum(padded(bucket.size_bytes) for bucket in each) for each in rounds), default=0)
    return group.buffers(min(2, len(rounds)), most)


def _in_bucket(raw: Tensor, box: Box, offset: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix whose bytes begin at `offset`."""
    size = box.num_elements * dtype.itemsize
    return raw[offset : offset + size].view(dtype).view(box.bottom - box.top, box.right - box.left)
