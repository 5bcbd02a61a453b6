"""What the trainer hands over at a meeting: all of it gathered and looked at before anything moves.

So a refusal costs the receivers nothing. A model goes tensor by tensor through the carrier's two rooms, one of which is
packed while the other one travels: it has no room for a second copy. An adapter is small, and lies packed in memory of
its own; its names and forms are gone through again only when they are others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from tandem.bridge.collective.process_group import Group
from tandem.bridge.collective.shared_buffers import Lending
from tandem.bridge.common import manifest as wire
from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.flat_buffer import Flat
from tandem.bridge.common.packed_adapter import Laying
from tandem.bridge.common.served_tensors import Form, check_numbers, forms, shaped
from tandem.ops import digest
from tandem.ops.batched_copy import copy_all
from tandem.ops.phase_timer import Phases
from tandem.types import Fingerprints, Weights

Carrier: TypeAlias = Group | Lending


class Parcel(Protocol):
    @property
    def places(self) -> wire.Places: ...
    @property
    def fingerprints(self) -> Fingerprints: ...
    def hand_over(self, carrier: Carrier, manifest: wire.Manifest, deadline: Deadline) -> None: ...


class Packing:
    """Of one meeting."""

    def __init__(self, mode: str, replies: Sequence[Mapping[str, Any]]) -> None:
        """`replies`: what engines said of themselves; more may come."""
        self._mode, self._replies = mode, replies
        self._told: tuple[list[tuple[str, Form]], wire.Places] | None = None
        self._laying = Laying(mode, lambda into: (self._places(list(into.items())), b""))

    def parcel(self, weights: Weights, phases: Phases) -> Parcel:
        if weights.kind == "adapter":
            return self._adapter(weights, phases)
        into = forms(weights, self._replies, self._mode)
        fingerprints, odd = digest.all_at_once(shaped(weights, into, self._mode), phases)
        check_numbers(odd, weights, into, self._mode)
        return _ModelTensors(weights, into, self._places([(name, into[name]) for name in fingerprints]), fingerprints)

    def _adapter(self, weights: Weights, phases: Phases) -> Parcel:
        return _AdapterTensors(*self._laying.lay(weights, self._replies, phases))

    def _places(self, told: list[tuple[str, Form]]) -> wire.Places:
        """In the order in which tensors come."""
        if self._told is None or self._told[0] != told:
            self._told = told, wire.Places.of(dict(told))
        return self._told[1]


class _AdapterTensors:
    def __init__(self, flat: Flat, fingerprints: Fingerprints) -> None:
        self.places, self.fingerprints = flat.places, fingerprints
        self._flat = flat

    def hand_over(self, carrier: Carrier, manifest: wire.Manifest, deadline: Deadline) -> None:
        if manifest.size_bytes:
            carrier.broadcast(carrier.within(self._flat.raw), deadline)
        carrier.finish(f"version {manifest.version} was not taken", deadline)


class _ModelTensors:
    def __init__(
        self, weights: Weights, into: Mapping[str, Form], places: wire.Places, fingerprints: Fingerprints
    ) -> None:
        self.places, self.fingerprints = places, fingerprints
        self._weights, self._into = weights, into

    def hand_over(self, carrier: Carrier, manifest: wire.Manifest, deadline: Deadline) -> None:
        packer = _Packer(carrier, manifest, deadline)
        for name, tensor in shaped(self._weights, self._into, manifest.mode):
            packer.add(wire.as_bytes(tensor), manifest.tensors[name].offset)
        packer.finish()


def rooms_of(manifest: wire.Manifest) -> int:
    """One is written while the other one travels."""
    return min(2, -(-manifest.size_bytes // manifest.bucket_bytes))


class _Packer:
    """Tensors, one behind the other, into the bucket whose turn it is."""

    def __init__(self, carrier: Carrier, manifest: wire.Manifest, deadline: Deadline) -> None:
        self._carrier: Any = carrier
        self._deadline = deadline
        self._bucket_bytes, self._left = manifest.bucket_bytes, manifest.size_bytes
        self._failed = f"version {manifest.version} was not taken"
        rooms = rooms_of(manifest)
        size = min(self._bucket_bytes, manifest.size_bytes)
        self._buffers = carrier.buffers(rooms, size)
        self._works: list[Any] = [None] * rooms
        self._turn = 0
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, raw: Tensor, position: int) -> None:
        while raw.numel():
            bucket, at = divmod(position, self._bucket_bytes)
            self._go_on_to(bucket)
            part = raw[: self._bucket_bytes - at]
            self._pairs.append(_wide(self._buffers[bucket % 2][at : at + part.numel()], part))
            raw, position = raw[part.numel() :], position + part.numel()

    def finish(self) -> None:
        if self._left:
            self._send()
        self._carrier.finish(self._failed, self._deadline)

    def _go_on_to(self, bucket: int) -> None:
        while self._turn < bucket:
            self._send()

    def _send(self) -> None:
        room = self._turn % 2
        full = min(self._bucket_bytes, self._left)
        copy_all(self._pairs)
        self._pairs.clear()
        self._works[room] = self._carrier.broadcast(self._buffers[room][:full], self._deadline)
        self._left -= full
        self._turn += 1
        if self._left and (before := self._works[self._turn % 2]) is not None:
            self._carrier.free(before, self._failed, self._deadline)


def _wide(into: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
    """The same bytes, eight at a time where both begin and end so."""
    if (raw.numel() | raw.data_ptr() | into.data_ptr()) % 8:
        return into, raw
    return into.view(torch.int64), raw.view(torch.int64)
