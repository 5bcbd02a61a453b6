"""Rank 0's part of a version that travels as boxes: ask the other ranks, check what all hold, make the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.bridge.collective.box_proof import expected_of_receivers, served_places
from tandem.bridge.collective.boxes import BoxTable, SentWeights
from tandem.bridge.collective.control_channel import ChannelAddress
from tandem.bridge.collective.process_group import Group
from tandem.bridge.collective.rank_senders import OtherRanks
from tandem.bridge.common import manifest as wire
from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.held_weights import Held, StaleRanks, fingerprints
from tandem.bridge.common.packer import Carrier, Form, forms
from tandem.bridge.common.places import check_held, check_served, distinct, sizes_of
from tandem.errors import SyncError
from tandem.ops.phase_timer import Phases
from tandem.types import Fingerprints, Weights

WriteOnce = Callable[[str, str, Deadline], None]
"""Writes a message that stays: its key, its text."""


@dataclass(frozen=True, slots=True)
class PackedBoxes:
    """A version that every rank is ready to send."""

    weights: Weights
    table: BoxTable
    places: wire.Placement
    fingerprints: Fingerprints
    expected: Sequence[Sequence[str]]
    """Of each receiver: the digest of each of its boxes."""
    devices: Sequence[str]
    """Of the other ranks."""
    own: SentWeights
    first_receiver: int
    bucket_bytes: int
    mode: str

    def manifest(self, way: str) -> wire.Manifest:
        return wire.Manifest(
            self.mode,
            self.weights.version,
            self.weights.kind,
            self.places.tensors,
            self.fingerprints,
            size_bytes=self.places.size_bytes,
            bucket_bytes=self.bucket_bytes,
            way=way,
            boxes=self.table.checksum,
        )

    def hand_over(self, carrier: Carrier, manifest: wire.Manifest, deadline: Deadline) -> None:
        assert isinstance(carrier, Group)
        self.own.send(self.table.plan, 0, self.first_receiver, carrier, deadline)


class BoxPacking:
    """Packs the versions of one connection."""

    def __init__(
        self, address: ChannelAddress, replies: Sequence[Mapping[str, Any]], others: OtherRanks, row_shards: int
    ) -> None:
        """`replies`: of engines when they were attached; more may come. `row_shards`: into how many runs of rows each
        tensor is cut."""
        self._address, self._replies, self._others, self._row_shards = address, replies, others, row_shards
        self._places: wire.Placement | None = None
        self._order: list[str] = []
        self._table: BoxTable | None = None
        self._stale = StaleRanks(address.mode)

    def pack(
        self, weights: Weights, bucket_bytes: int, write: WriteOnce, deadline: Deadline, phases: Phases
    ) -> PackedBoxes:
        mode, version = self._address.mode, weights.version
        places, into = self._placement(weights)
        served, engines = served_places(self._replies, into, self._address.num_receivers, mode)
        sizes = sizes_of(into)
        try:
            check_served(sizes, engines)
        except SyncError as error:
            raise SyncError(f"{mode}: version {version} was not sent: {error}") from error
        write(f"places/{places.checksum}", places.text, deadline)
        asked = BoxTable(into, [], served, bucket_bytes)
        write(f"boxes/{asked.checksum}", asked.text, deadline)
        self._others.ask(
            {"version": version, "kind": weights.kind, "places": places.checksum, "boxes": asked.checksum}, deadline
        )
        own = SentWeights(weights, into, mode)
        first = own.digest(distinct(served), phases)
        others = self._others.held(into, version, deadline)
        held = [first, *(each for each, _ in others)]
        try:
            check_held(sizes, [each.places for each in held], self._row_shards)
        except SyncError as error:
            raise SyncError(f"{mode}: version {version} was not sent: {error}") from error
        found = fingerprints(into, held, version, mode)
        self._stale.check(held, version, sizes)
        table = self._table_of(into, held, served, bucket_bytes)
        write(f"boxes/{table.checksum}", table.text, deadline)
        phases.end("hash")
        return PackedBoxes(
            weights,
            table,
            places,
            found,
            expected_of_receivers(held, served, mode),
            [device for _, device in others],
            own,
            self._address.senders,
            bucket_bytes,
            mode,
        )

    def _placement(self, weights: Weights) -> tuple[wire.Placement, dict[str, Form]]:
        """Return the forms of what is served, in the order in which this rank yields its parts."""
        layout = forms(weights, self._replies, self._address.mode)
        if self._places is None or layout.keys() != set(self._order):
            names = dict.fromkeys(part.name for part in weights.parts())
            self._order = [*(name for name in names if name in layout), *(name for name in layout if name not in names)]
        into = {name: layout[name] for name in self._order}
        places = wire.Placement.of(into)
        if self._places is None or self._places.checksum != places.checksum:
            self._places = places
        return self._places, into

    def _table_of(self, into: Mapping[str, Form], held: Sequence[Held], served: Any, bucket_bytes: int) -> BoxTable:
        """Return the table, and the one of the version before if it is the same: its plan is made already."""
        table = BoxTable(into, [each.places for each in held], served, bucket_bytes)
        if self._table is None or self._table.checksum != table.checksum:
            self._table = table
        return self._table
