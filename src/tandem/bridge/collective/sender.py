"""The trainer's end of `broadcast` and `adapter_broadcast`: announce a version, move its buckets, read the verdicts.

receiver.py has the order of messages.
"""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tandem.bridge.collective.box_packing import BoxPacking
from tandem.bridge.collective.control_channel import (
    BROKEN,
    CLOSING_S,
    WAY_OUT,
    ChannelAddress,
    ControlChannel,
    reported,
)
from tandem.bridge.collective.last_messages import LastMessages
from tandem.bridge.collective.process_group import Group
from tandem.bridge.collective.rank_senders import OtherRanks
from tandem.bridge.collective.receiver import GroupSource
from tandem.bridge.collective.shared_buffers import AGAIN, UNMAPPED, BufferWriter, SharedBuffers, Unmapped
from tandem.bridge.common import manifest as wire
from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.manifest import padded
from tandem.bridge.common.packer import Carrier, PackedVersion, Packing, num_buffers
from tandem.errors import SpecError, SyncError, SyncTimeout
from tandem.ops.device_names import device_name
from tandem.ops.phase_timer import Phases
from tandem.types import Sent, WeightKind, Weights

_log = logging.getLogger(__name__)
_BUCKET_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}


Backend = Literal["auto", "gloo", "nccl", "ipc"]


class Transport(NamedTuple):
    """What moves the buckets of one connection."""

    requested: Backend
    engaged: Literal["gloo", "nccl", "ipc", "memory"]
    """ipc: shared memory of one GPU. memory: shared memory of one host."""
    why: str = ""
    """Why auto took none of the faster ones."""

    @property
    def is_shared(self) -> bool:
        return self.engaged in ("ipc", "memory")


class CollectiveBridge:
    """What broadcast and adapter_broadcast share."""

    mode: str
    carries: WeightKind

    def __init__(
        self,
        device: torch.device | str,
        host: str,
        bucket_bytes: int,
        deadline_s: float,
        backend: Backend,
        *,
        roomy: bool,
        ranks: int = 1,
        row_shards: int = 0,
    ) -> None:
        """`device`: where the trainer's tensors are. `bucket_bytes`: 0 sends all in one bucket. `roomy`: the trainer's
        GPU has memory for a second copy of what travels. `ranks`: of the trainer; this is the end of rank 0.
        `row_shards`: into how many runs of rows each tensor is cut; 0: as many as ranks."""
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._host, self._bucket_bytes, self._deadline_s, self._roomy = host, bucket_bytes, deadline_s, roomy
        self._backend: Backend = backend
        self._ranks, self._row_shards = ranks, row_shards or ranks
        self._connection: _Connection | None = None
        self._num_connections = 0

    def source(self, num_receivers: int = 1) -> GroupSource:
        self.close()
        self._num_connections += 1
        try:
            listening = socket.create_server((self._host, 0), backlog=128)
        except OSError as error:
            raise SpecError(f"sync.host = '{self._host}': the trainer cannot listen there: {error.strerror}") from error
        address = ChannelAddress(
            self.mode,
            self._host,
            listening.getsockname()[1],
            uuid.uuid4().hex,
            self._num_connections,
            num_receivers + self._ranks,
            self._device.type,
            self._deadline_s,
            self._ranks,
        )
        self._connection = _Connection(
            address,
            listening,
            self._device,
            self.carries,
            self._backend,
            roomy=self._roomy,
            row_shards=self._row_shards,
        )  # fmt: skip
        return self._connection.source

    @property
    def rank_link(self) -> Mapping[str, Any]:
        """What the other ranks of the trainer need to join the present connection (rank_senders.RankSender)."""
        if self._connection is None:
            raise SyncError(
                f"{self.mode}: no engine was given a link, so there is nothing to join; call source() first"
            )
        return self._connection.source.link

    def storage(self) -> Mapping[str, Tensor] | None:
        return None

    def send(self, weights: Weights) -> Sent:
        if self._connection is None:
            raise SyncError(f"{self.mode}: send() before source(): no engine was given a link")
        return self._connection.send(weights, self._bucket_bytes)

    def close(self) -> None:
        host, self._connection = self._connection, None
        if host is not None:
            host.close()


class BroadcastBridge(CollectiveBridge):
    mode = "broadcast"
    carries: WeightKind = "full"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        host: str = "127.0.0.1",
        bucket_bytes: int = 0,
        deadline_s: float = 60.0,
        backend: Backend = "auto",
        roomy: bool = False,
        ranks: int = 1,
        row_shards: int = 0,
    ) -> None:
        """`host`: the trainer's address as engines reach it. `bucket_bytes`: 0 uses the default for the device.
        `roomy`: an engine on the trainer's GPU has memory for a second copy of the weights while they arrive. `ranks`:
        of the trainer; every other rank calls `RankSender.send` when this end sends. `row_shards`: into how many runs
        of rows each tensor is cut; 0: as many as ranks."""
        size = bucket_bytes or _BUCKET_BYTES[torch.device(device).type]
        super().__init__(
            device, host, padded(size), deadline_s, backend, roomy=roomy, ranks=ranks, row_shards=row_shards
        )


class AdapterBroadcastBridge(CollectiveBridge):
    mode = "adapter_broadcast"
    carries: WeightKind = "adapter"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        host: str = "127.0.0.1",
        deadline_s: float = 60.0,
        backend: Backend = "auto",
        base_wanted: bool = False,
    ) -> None:
        """`host`: the trainer's address as engines reach it. `base_wanted`: ask engines to share the memory of the base
        that they serve, so that the trainer needs no copy of its own (bridge/shared/adapter_base.py)."""
        self._base_wanted = base_wanted
        super().__init__(device, host, bucket_bytes=0, deadline_s=deadline_s, backend=backend, roomy=True)

    def source(self, num_receivers: int = 1) -> GroupSource:
        source = super().source(num_receivers)
        if self._base_wanted:  # not otherwise: the server of an engine refuses that key
            source.link = {**source.link, "base_wanted": True}
        return source


class _Connection:
    """The trainer's side of one connection: rank 0, and the host of the store."""

    def __init__(
        self,
        address: ChannelAddress,
        listening: socket.socket,
        device: torch.device,
        carries: WeightKind,
        backend: Backend,
        *,
        roomy: bool,
        row_shards: int,
    ) -> None:
        self._address, self._device, self._roomy = address, device, roomy
        self._backend: Backend = backend
        store = address.host_it(listening)
        self._channel = ControlChannel(address, store, mine=True)
        self._others = OtherRanks(address, store)
        self.source = GroupSource(address.to_link(), address.mode, carries, device if device.type == "cpu" else None)
        self._packing = Packing(address.mode, self.source.replies)
        self._row_shards = row_shards
        self._boxes: BoxPacking | None = None
        self._placement: wire.Placement | None = None
        """The placement that receivers were sent last."""
        self._written = set[str]()
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._group: Group | None = None
        self._memory: SharedBuffers | None = None
        self._sequence, self._ended = 0, ""

    def send(self, weights: Weights, bucket_bytes: int) -> Sent:
        deadline = Deadline(self._address.mode, self._address.deadline_s, self._given_up)
        failed = f"version {weights.version} was not sent"
        deadline.until(lambda: self._lock.acquire(blocking=False), failed)
        try:
            if self._ended:
                raise SyncError(f"{self._address.mode}: this connection has ended: {self._ended}; {WAY_OUT}")
            phases = Phases()
            if self._goes_by_boxes(weights):
                return self._send_boxes(weights, bucket_bytes, deadline, phases)
            packed = self._packing.pack(weights, phases)
            size = packed.places.size_bytes
            manifest = wire.Manifest(
                self._address.mode,
                weights.version,
                weights.kind,
                packed.places.tensors,
                packed.fingerprints,
                adapter=weights.adapter,
                size_bytes=size,
                bucket_bytes=bucket_bytes or max(size, 1),
            )
            self._write_placement(packed.places, deadline)
            phases.end("gather")
            chosen = self._send(packed, manifest, deadline, phases)
        finally:
            self._lock.release()
        return Sent(
            weights.version,
            self._address.mode,
            manifest.digests,
            manifest.size_bytes,
            phases.seconds,
            transport=chosen._asdict(),
        )

    def close(self) -> None:
        self._given_up.set()
        self.source.close()
        if not self._lock.acquire(timeout=CLOSING_S):
            return  # send() is running: it sees `_given_up` and ends the group itself
        self._end("it was closed", broken=False)
        # Receivers wait for the next announcement: tell them that there will be none.
        self._channel.close(
            self._sequence, "the trainer closed this connection", Deadline(self._address.mode, CLOSING_S)
        )
        self._channel.linger()
        self._lock.release()

    def _write_placement(self, places: wire.Placement, deadline: Deadline) -> None:
        """Write the placement of tensors once; manifests refer to it by its checksum."""
        if places is not self._placement:
            self._channel.write(f"places/{places.checksum}", places.text, deadline)
            self._placement = places

    def _goes_by_boxes(self, weights: Weights) -> bool:
        """Return whether every receiver gets its own rectangles. Shared buffers have whole tensors."""
        if self._address.senders > 1:
            return True
        by_boxes = weights.kind == "full" and any(reply.get("boxes") for reply in self.source.replies)
        return by_boxes and not self._chosen_transport().is_shared

    def _send_boxes(self, weights: Weights, bucket_bytes: int, deadline: Deadline, phases: Phases) -> Sent:
        """Send rectangles of tensors, from every rank to every receiver. rank_senders.py has the order of messages."""
        self._others.begin()
        try:
            self._boxes = self._boxes or BoxPacking(self._address, self.source.replies, self._others, self._row_shards)
            packed = self._boxes.pack(weights, bucket_bytes, self._write_once, deadline, phases)
            chosen = self._chosen_transport(packed.devices)
            manifest = packed.manifest(way=chosen.engaged)
            for rank, digests in enumerate(packed.expected, self._address.senders):
                self._channel.write(f"{self._sequence + 1}/expected/{rank}", "".join(digests), deadline)
            self._placement = packed.places
            self._gather_receivers(manifest, deadline)
            phases.end("meet")
        except BaseException as error:
            self._others.refuse(str(error) or type(error).__name__)
            raise
        self._others.go({"sequence": self._sequence, "boxes": manifest.boxes, "way": manifest.way}, deadline)
        try:
            self._move(packed, manifest, deadline)
            phases.end("move")
            self._await_verdicts(manifest, deadline)
        except BaseException as error:
            self._tell_all(str(error) or type(error).__name__)
            if isinstance(error, SyncTimeout) and (silent := self._last_messages.silent()):
                raise SyncTimeout(f"{error}; {', '.join(silent)} said nothing more") from error
            raise
        self._tell_all("")
        phases.end("confirm")
        transport = {**chosen._asdict(), "ranks": str(self._address.senders)}
        return Sent(
            weights.version,
            self._address.mode,
            manifest.digests,
            packed.table.plan.total_bytes,
            phases.seconds,
            transport=transport,
        )

    def _tell_all(self, why_not: str) -> None:
        """Tell receivers whether all of them have what they serve: none serves the version otherwise."""
        self._channel.write(f"{self._sequence}/all", why_not, Deadline(self._address.mode, CLOSING_S))

    def _write_once(self, key: str, text: str, deadline: Deadline) -> None:
        """Write what stays until it changes: its key has its checksum."""
        if key not in self._written:
            self._channel.write(key, text, deadline)
            self._written.add(key)

    def _chosen_transport(self, other_ranks: Sequence[str] = ()) -> Transport:
        """Return the transport that worked before, or choose one. `other_ranks`: their devices."""
        if self._transport is None:
            devices = [each for reply in self.source.replies for each in reply.get("devices", ("",))]
            self._transport = choose_transport(
                self._address.mode, self._backend, self._device, devices, roomy=self._roomy, other_ranks=other_ranks
            )
        return self._transport

    def _send(self, packed: PackedVersion, manifest: wire.Manifest, deadline: Deadline, phases: Phases) -> Transport:
        """Send by the transport that worked before. Only backend auto falls back to another."""
        self._transport = self._chosen_transport()
        try:
            self._send_by(self._transport, packed, manifest, deadline, phases)
        except Unmapped as error:
            if self._backend != "auto":
                raise
            _log.warning("%s; sending through the host instead", error)
            self._transport, self._memory = Transport("auto", "gloo", str(error)), None
            self._send_by(self._transport, packed, manifest, deadline, phases)
        return self._transport

    def _send_by(
        self, chosen: Transport, packed: PackedVersion, manifest: wire.Manifest, deadline: Deadline, phases: Phases
    ) -> None:
        lent = self._shared_buffers(manifest).handles if chosen.is_shared else ()
        # With several receivers all take a version or none: one that copied early could not know that another refuses.
        filled = len(lent) == 1 and num_buffers(manifest) <= 1
        manifest = replace(manifest, way=chosen.engaged, lent=lent, filled=filled)
        if filled:
            self._move(packed, manifest, deadline)
            phases.end("move")
            self._announce(manifest, deadline)
            self._await_filled(manifest, deadline)
        else:
            self._gather_receivers(manifest, deadline)
            phases.end("meet")
            self._move(packed, manifest, deadline)
            phases.end("move")
            self._await_verdicts(manifest, deadline)
        phases.end("confirm")

    def _shared_buffers(self, manifest: wire.Manifest) -> SharedBuffers:
        """Return buffers of that size. They are free: all receivers took the version before, or this connection has
        ended."""
        size, count = min(manifest.bucket_bytes, manifest.size_bytes), max(1, num_buffers(manifest))
        if self._memory is None or self._memory.buffer_bytes < size or len(self._memory.tensors) < count:
            receivers = self._address.num_receivers
            self._memory = SharedBuffers(self._address.token, self._device, count, size, receivers)
        return self._memory

    def _announce(self, manifest: wire.Manifest, deadline: Deadline) -> None:
        text, failed = manifest.to_text(self._placement), f"version {manifest.version} was not announced"
        self._sequence += 1
        self._channel.announce(self._sequence, text, failed, deadline, claimable=manifest.filled)
        self._delete_old(self._sequence - 2)

    def _tell_what_follows(self, error: Exception) -> None:
        """Tell receivers that know this version why it does not come, or that it comes again."""
        again = isinstance(error, Unmapped) and self._backend == "auto"
        text = AGAIN if again else str(error)
        self._channel.write(f"{self._sequence}/go", text, Deadline(self._address.mode, CLOSING_S))

    def _gather_receivers(self, manifest: wire.Manifest, deadline: Deadline) -> None:
        """Announce the version and wait until every receiver accepts it. Until then either end may refuse; from then to
        the end of `_move` both go in step."""
        mode, version = self._address.mode, manifest.version
        self._announce(manifest, deadline)
        now = self._sequence
        refusals: list[str] = []
        try:
            answers = self._read_from_all(f"{now}/answer", f"for version {version}, {{}} did not come", deadline)
            refusals = [f"{self._address.member(rank)}: {text}" for rank, text in answers.items() if text]
            if refusals:
                kind = Unmapped if all(UNMAPPED in text for text in refusals) else SyncError
                raise kind(f"{mode}: version {version} was not sent: {'; '.join(refusals)}")
        except SyncError as error:
            # A late receiver must not wait in a collective for a sender that has left it.
            self._tell_what_follows(error)
            raise
        self._channel.write(f"{now}/go", "", deadline)

    def _move(self, packed: PackedVersion, manifest: wire.Manifest, deadline: Deadline) -> None:
        carrier: Carrier | None = None

        def break_off(why: str) -> None:
            if isinstance(carrier, BufferWriter):
                carrier.break_off(why)
            if manifest.filled:  # it is not announced yet, and never will be
                with suppress(SyncError):
                    self._channel.close(self._sequence, why, Deadline(self._address.mode, CLOSING_S))
                self._end(why, broken=True)
            else:
                self._break_off(why)

        with reported(self._address.mode, f"version {manifest.version} was not sent completely", break_off):
            carrier = self._carrier(manifest, deadline)
            with carrier.aside():
                packed.hand_over(carrier, manifest, deadline)

    def _carrier(self, manifest: wire.Manifest, deadline: Deadline) -> Carrier:
        if manifest.lent:
            assert self._memory is not None
            arguments = (self._memory, self._device, self._channel, self._sequence, len(manifest.lent))
            return BufferWriter(*arguments, filled=manifest.filled)
        if self._group is None:
            device = self._device if manifest.way == "nccl" else torch.device("cpu")
            self._group = Group(self._address, 0, self._channel, device, deadline)
        done = [f"{self._sequence}/done/{rank}" for rank in self._receivers]
        self._group.listen([*self._last_messages.keys.values()] if manifest.boxes else done)
        return self._group

    def _await_filled(self, manifest: wire.Manifest, deadline: Deadline) -> None:
        mode, version, now = self._address.mode, manifest.version, self._sequence
        try:
            verdict = self._channel.read(f"{now}/done/1", f"version {version} was not taken", deadline)
        except BaseException as error:
            if self._withdraw():
                why = f"for version {version}, receiver 0 did not come"
            else:  # it reads the buffer, or has read it: how far, is unknown
                why = f"version {version}: receiver 0 did not confirm it"
                self._end(str(error) or type(error).__name__, broken=True)
            if isinstance(error, SyncTimeout):
                raise deadline.missed(why) from None
            raise
        if not verdict:
            return
        self._withdraw()
        if UNMAPPED in verdict:
            unmapped = Unmapped(f"{mode}: version {version} was not sent: receiver 0: {verdict}")
            self._tell_what_follows(unmapped)
            raise unmapped
        self._raise_refusals(version, {1: verdict})

    def _withdraw(self) -> bool:
        """Withdraw the announcement, so that no receiver will read its buffer. False: the receiver claimed it first."""
        failed = "the announcement was not withdrawn"
        return self._channel.claim(self._sequence, failed, Deadline(self._address.mode, CLOSING_S))

    def _await_verdicts(self, manifest: wire.Manifest, deadline: Deadline) -> None:
        version = manifest.version
        failed = f"version {version}: {{}} did not confirm it"
        try:
            if manifest.boxes:
                verdicts = self._last_messages.read(failed, deadline)
            else:
                verdicts = self._read_from_all(f"{self._sequence}/done", failed, deadline)
        except BaseException as error:  # how far a silent receiver has come, is unknown
            self._break_off(str(error) or type(error).__name__)
            raise
        self._raise_refusals(version, verdicts)

    def _raise_refusals(self, version: int, verdicts: Mapping[int, str]) -> None:
        """Raise SyncError if any receiver refused the version."""
        if wrong := [f"{self._address.member(rank)}: {text}" for rank, text in verdicts.items() if text]:
            why = f"{self._address.mode}: version {version} was refused: {'; '.join(wrong)}"
            if any(text.startswith(BROKEN) for text in verdicts.values()):
                self._break_off(why)
            raise SyncError(why)

    def _read_from_all(self, key: str, failed: str, deadline: Deadline) -> dict[int, str]:
        """Return every receiver's message, by rank."""
        messages: dict[int, str] = {}
        for rank in self._receivers:
            try:
                messages[rank] = self._channel.read(
                    f"{key}/{rank}", failed.format(self._address.member(rank)), deadline
                )
            except SyncTimeout:
                silent = [
                    each - self._address.senders for each in self._receivers if not self._channel.has(f"{key}/{each}")
                ]
                who = f"receiver{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
                raise deadline.missed(failed.format(who)) from None
        return messages

    def _delete_old(self, sequence: int) -> None:
        """Delete the messages of an announcement that no receiver reads any more."""
        names = ("answer", "done", "expected") if self._boxes else ("answer", "done")
        answers = [f"{sequence}/{name}/{rank}" for name in names for rank in self._receivers]
        if self._boxes:
            answers += [f"{sequence}/all", *(f"{sequence}/sent/{rank}" for rank in self._others.numbers)]
        for key in (f"{sequence}/manifest", f"{sequence}/go", *answers):
            self._channel.store.delete_key(key)

    def _break_off(self, why: str) -> None:
        """Tell all that still take part, and end the connection."""
        with suppress(SyncError):
            self._channel.write(f"{self._sequence}/broken", why, Deadline(self._address.mode, CLOSING_S))
        self._end(why, broken=True)

    @property
    def _last_messages(self) -> LastMessages:
        return LastMessages(self._address, self._channel, self._sequence)

    @property
    def _receivers(self) -> range:
        """Their ranks in the group."""
        return range(self._address.senders, self._address.world_size)

    def _end(self, why: str, *, broken: bool) -> None:
        group, self._group, self._ended = self._group, None, self._ended or why
        self._memory = None
        self._others.close(self._ended)
        if group is not None:
            group.close(broken=broken)


def choose_transport(
    mode: str,
    requested: Backend,
    device: torch.device,
    theirs: Sequence[str],
    *,
    roomy: bool,
    other_ranks: Sequence[str] = (),
) -> Transport:
    """Choose what moves the buckets. `theirs`: the device of each engine worker. `roomy`: the GPU has memory for a
    second copy of what travels. `other_ranks`: the device of each other rank of the trainer."""
    ours = device_name(device)
    alone = "" if not other_ranks else f"shared buffers are for one rank, and the trainer has {1 + len(other_ranks)}"
    if requested == "ipc" and alone:
        raise SyncError(f"{mode}: sync.backend = 'ipc': {alone}; use 'nccl', 'gloo' or 'auto'")
    if device.type == "cpu":
        if requested == "nccl":
            raise SyncError(f"{mode}: sync.backend = 'nccl': the trainer is on a CPU; use 'gloo' or 'ipc'")
        return Transport(requested, "memory" if requested == "ipc" else "gloo")
    match requested:
        case "gloo":
            return Transport(requested, "gloo")
        case "ipc":
            if odd := [each for each in theirs if each != ours]:
                raise SyncError(
                    f"{mode}: sync.backend = 'ipc': the trainer is on GPU {ours} and an engine on {odd[0] or 'none'}; "
                    "use 'nccl' or 'gloo'"
                )
            return Transport(requested, "ipc")
        case "nccl":
            if why := _why_no_nccl([ours, *other_ranks], theirs):
                raise SyncError(f"{mode}: sync.backend = 'nccl': {why}; use 'auto' or 'gloo'")
            return Transport(requested, "nccl")
        case "auto":
            if roomy and set(theirs) == {ours} and not alone:
                return Transport(requested, "ipc")
            why = _why_no_nccl([ours, *other_ranks], theirs)
            return Transport(
                requested, "gloo" if why else "nccl", "; ".join(filter(None, (why, alone if roomy else "")))
            )


def _why_no_nccl(ours: Sequence[str], theirs: Sequence[str]) -> str:
    if odd := [each for each in theirs if each in ("", "cpu")]:
        return f"an engine is on {odd[0] or 'a device that it does not name'}, and NCCL joins GPUs"
    if len({*ours, *theirs}) < len(ours) + len(theirs):
        return "NCCL cannot have two of its ranks on one GPU"
    return ""
