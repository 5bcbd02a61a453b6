"""The trainer's end of a meeting: whom it meets, by which way, and what they say of each version."""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tandem.bridge.collective.control_channel import BROKEN, CLOSING_S, WAY_OUT, ChannelAddress, ControlChannel, told
from tandem.bridge.collective.process_group import Group
from tandem.bridge.collective.receiver import GroupSource
from tandem.bridge.collective.shared_buffers import AGAIN, UNMAPPED, Lending, SharedBuffers, Unmapped
from tandem.bridge.common import manifest as wire
from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.manifest import padded
from tandem.bridge.common.packer import Carrier, Packing, Parcel, rooms_of
from tandem.errors import SpecError, SyncError, SyncTimeout
from tandem.ops.device_names import device_name
from tandem.ops.phase_timer import Phases
from tandem.types import Sent, WeightKind, Weights

_log = logging.getLogger(__name__)
_BUCKET_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}

Backend = Literal["auto", "gloo", "nccl", "ipc"]


class Way(NamedTuple):
    requested: Backend
    engaged: Literal["gloo", "nccl", "ipc", "memory"]
    """ipc: memory of the GPU that both are on. memory: of the host."""
    why: str = ""
    """Where auto took none of the faster ones."""

    @property
    def is_lent(self) -> bool:
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
    ) -> None:
        """`device`: where the trainer's tensors are. `bucket_bytes`: 0 is all in one. `roomy`: what travels fits a
        second time on the trainer's GPU."""
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._host, self._bucket_bytes, self._deadline_s, self._roomy = host, bucket_bytes, deadline_s, roomy
        self._backend: Backend = backend
        self._host_of: _Host | None = None
        self._meetings = 0

    def source(self, num_receivers: int = 1) -> GroupSource:
        self.close()
        self._meetings += 1
        try:
            listening = socket.create_server((self._host, 0), backlog=128)
        except OSError as error:
            raise SpecError(f"sync.host = '{self._host}': nobody can listen there: {error.strerror}") from error
        meeting = ChannelAddress(
            self.mode,
            self._host,
            listening.getsockname()[1],
            uuid.uuid4().hex,
            self._meetings,
            num_receivers + 1,
            self._device.type,
            self._deadline_s,
        )
        self._host_of = _Host(meeting, listening, self._device, self.carries, self._backend, self._roomy)
        return self._host_of.source

    def storage(self) -> Mapping[str, Tensor] | None:
        return None

    def send(self, weights: Weights) -> Sent:
        if self._host_of is None:
            raise SyncError(f"{self.mode}: send() before source(): there is nobody to meet")
        return self._host_of.send(weights, self._bucket_bytes)

    def close(self) -> None:
        host, self._host_of = self._host_of, None
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
    ) -> None:
        """`host`: the trainer's address as engines reach it. `bucket_bytes`: 0 is what suits the device. `roomy`: an
        engine on the trainer's GPU has room there for a second copy of the weights while they come."""
        size = bucket_bytes or _BUCKET_BYTES[torch.device(device).type]
        super().__init__(device, host, padded(size), deadline_s, backend, roomy=roomy)


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
        """`host`: the trainer's address as engines reach it. `base_wanted`: engines are asked for the memory of
        the base that they serve, so that the trainer needs no copy of its own (bridge/shared/adapter_base.py)."""
        self._base_wanted = base_wanted
        super().__init__(device, host, bucket_bytes=0, deadline_s=deadline_s, backend=backend, roomy=True)

    def source(self, num_receivers: int = 1) -> GroupSource:
        source = super().source(num_receivers)
        if self._base_wanted:  # an engine's server knows no such key
            source.link = {**source.link, "base_wanted": True}
        return source


class _Host:
    """The trainer at one meeting: rank 0, and the store's owner."""

    def __init__(
        self,
        meeting: ChannelAddress,
        listening: socket.socket,
        device: torch.device,
        carries: WeightKind,
        backend: Backend,
        roomy: bool,
    ) -> None:
        self._meeting, self._device, self._roomy = meeting, device, roomy
        self._backend: Backend = backend
        self._notes = ControlChannel(meeting, meeting.host_it(listening), mine=True)
        self.source = GroupSource(meeting.to_link(), meeting.mode, carries, device if device.type == "cpu" else None)
        self._packing = Packing(meeting.mode, self.source.replies)
        self._places: wire.Places | None = None
        """That receivers were told of last."""
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._way: Way | None = None
        self._group: Group | None = None
        self._memory: SharedBuffers | None = None
        self._sequence, self._ended = 0, ""

    def send(self, weights: Weights, bucket_bytes: int) -> Sent:
        deadline = Deadline(self._meeting.mode, self._meeting.deadline_s, self._given_up)
        failed = f"version {weights.version} was not sent"
        deadline.until(lambda: self._lock.acquire(blocking=False), failed)
        try:
            if self._ended:
                raise SyncError(f"{self._meeting.mode}: this meeting has ended: {self._ended}; {WAY_OUT}")
            phases = Phases()
            parcel = self._packing.parcel(weights, phases)
            size = parcel.places.size_bytes
            manifest = wire.Manifest(
                self._meeting.mode,
                weights.version,
                weights.kind,
                parcel.places.tensors,
                parcel.fingerprints,
                adapter=weights.adapter,
                size_bytes=size,
                bucket_bytes=bucket_bytes or max(size, 1),
            )
            self._tell_places(parcel.places, deadline)
            phases.end("gather")
            chosen = self._carry(parcel, manifest, deadline, phases)
        finally:
            self._lock.release()
        return Sent(
            weights.version,
            self._meeting.mode,
            manifest.digests,
            manifest.size_bytes,
            phases.seconds,
            transport=chosen._asdict(),
        )

    def close(self) -> None:
        self._given_up.set()
        self.source.close()
        if not self._lock.acquire(timeout=CLOSING_S):
            return  # whoever sends finds out, and ends the group itself
        self._end("it was closed", broken=False)
        # Receivers wait for the next announcement: it comes, and says that there will be none.
        self._notes.close(self._sequence, "the trainer closed this meeting", Deadline(self._meeting.mode, CLOSING_S))
        self._notes.linger()
        self._lock.release()

    def _tell_places(self, places: wire.Places, deadline: Deadline) -> None:
        """A note that stays: manifests name it, and whoever has read it does not read it again."""
        if places is not self._places:
            self._notes.write(f"places/{places.checksum}", places.text, deadline)
            self._places = places

    def _carry(self, parcel: Parcel, manifest: wire.Manifest, deadline: Deadline, phases: Phases) -> Way:
        """What works is kept for all versions of this meeting. Only auto looks for another."""
        if self._way is None:
            devices = [each for reply in self.source.replies for each in reply.get("devices", ("",))]
            self._way = way(self._meeting.mode, self._backend, self._device, devices, roomy=self._roomy)
        try:
            self._carry_by(self._way, parcel, manifest, deadline, phases)
        except Unmapped as error:
            if self._backend != "auto":
                raise
            _log.warning("%s; by way of the host instead", error)
            self._way, self._memory = Way("auto", "gloo", str(error)), None
            self._carry_by(self._way, parcel, manifest, deadline, phases)
        return self._way

    def _carry_by(
        self, chosen: Way, parcel: Parcel, manifest: wire.Manifest, deadline: Deadline, phases: Phases
    ) -> None:
        lent = self._lend(manifest).handles if chosen.is_lent else ()
        # Of several receivers all take a version, or none: who would have taken it already when another one refuses?
        filled = len(lent) == 1 and rooms_of(manifest) <= 1
        manifest = replace(manifest, way=chosen.engaged, lent=lent, filled=filled)
        if filled:
            self._move(parcel, manifest, deadline)
            phases.end("move")
            self._announce(manifest, deadline)
            self._hear_of_filled(manifest, deadline)
        else:
            self._gather_everybody(manifest, deadline)
            phases.end("meet")
            self._move(parcel, manifest, deadline)
            phases.end("move")
            self._hear_verdicts(manifest, deadline)
        phases.end("confirm")

    def _lend(self, manifest: wire.Manifest) -> SharedBuffers:
        """Nobody reads there any more: each version before was taken by all, or else this meeting has ended."""
        size, rooms = min(manifest.bucket_bytes, manifest.size_bytes), max(1, rooms_of(manifest))
        if self._memory is None or self._memory.room_bytes < size or len(self._memory.rooms) < rooms:
            receivers = self._meeting.world_size - 1
            self._memory = SharedBuffers(self._meeting.token, self._device, rooms, size, receivers)
        return self._memory

    def _announce(self, manifest: wire.Manifest, deadline: Deadline) -> None:
        text, failed = manifest.to_text(self._places), f"version {manifest.version} was not announced"
        self._sequence += 1
        self._notes.announce(self._sequence, text, failed, deadline, claimable=manifest.filled)
        self._forget(self._sequence - 2)

    def _say_what_follows(self, error: Exception) -> None:
        """To those who were told of this version."""
        again = isinstance(error, Unmapped) and self._backend == "auto"
        text = AGAIN if again else str(error)
        self._notes.write(f"{self._sequence}/go", text, Deadline(self._meeting.mode, CLOSING_S))

    def _gather_everybody(self, manifest: wire.Manifest, deadline: Deadline) -> None:
        """From here to the end of `_move` both ends walk in step; before it, either may still refuse."""
        mode, version = self._meeting.mode, manifest.version
        self._announce(manifest, deadline)
        now = self._sequence
        refusals: list[str] = []
        try:
            answers = self._hear(f"{now}/answer", f"for version {version}, {{}} did not come", deadline)
            refusals = [f"receiver {rank - 1}: {text}" for rank, text in answers.items() if text]
            if refusals:
                kind = Unmapped if all(UNMAPPED in text for text in refusals) else SyncError
                raise kind(f"{mode}: version {version} was not sent: {'; '.join(refusals)}")
        except SyncError as error:
            # Whoever comes late must not wait in a collective for a sender that has gone on.
            self._say_what_follows(error)
            raise
        self._notes.write(f"{now}/go", "", deadline)

    def _move(self, parcel: Parcel, manifest: wire.Manifest, deadline: Deadline) -> None:
        carrier: Carrier | None = None

        def break_off(why: str) -> None:
            closing = Deadline(self._meeting.mode, CLOSING_S)
            if isinstance(carrier, Lending):
                carrier.break_off(why)
            with suppress(SyncError):
                if manifest.filled:  # nobody was told of it, and nobody will be
                    self._notes.close(self._sequence, why, closing)
                else:
                    self._notes.write(f"{self._sequence}/broken", why, closing)
            self._end(why, broken=True)

        with told(self._meeting.mode, f"version {manifest.version} was not sent to its end", break_off):
            carrier = self._carrier(manifest, deadline)
            with carrier.aside():
                parcel.hand_over(carrier, manifest, deadline)

    def _carrier(self, manifest: wire.Manifest, deadline: Deadline) -> Carrier:
        if manifest.lent:
            assert self._memory is not None
            arguments = (self._memory, self._device, self._notes, self._sequence, len(manifest.lent))
            return Lending(*arguments, filled=manifest.filled)
        if self._group is None:
            device = self._device if manifest.way == "nccl" else torch.device("cpu")
            self._group = Group(self._meeting, 0, self._notes, device, deadline)
        self._group.listen([f"{self._sequence}/done/{rank}" for rank in range(1, self._meeting.world_size)])
        return self._group

    def _hear_of_filled(self, manifest: wire.Manifest, deadline: Deadline) -> None:
        mode, version, now = self._meeting.mode, manifest.version, self._sequence
        try:
            verdict = self._notes.read(f"{now}/done/1", f"version {version} was not taken", deadline)
        except BaseException as error:
            if self._take_back():
                why = f"for version {version}, receiver 0 did not come"
            else:  # it reads there, or has read: how far it has come, nobody knows
                why = f"version {version}: receiver 0 did not confirm it"
                self._end(str(error) or type(error).__name__, broken=True)
            if isinstance(error, SyncTimeout):
                raise deadline.missed(why) from None
            raise
        if not verdict:
            return
        self._take_back()
        if UNMAPPED in verdict:
            unmapped = Unmapped(f"{mode}: version {version} was not sent: receiver 0: {verdict}")
            self._say_what_follows(unmapped)
            raise unmapped
        self._refused(version, {1: verdict})

    def _take_back(self) -> bool:
        """Nobody reads the room of this announcement, and nobody will. False: its receiver was there before."""
        failed = "the announcement was not taken back"
        return self._notes.claim(self._sequence, failed, Deadline(self._meeting.mode, CLOSING_S))

    def _hear_verdicts(self, manifest: wire.Manifest, deadline: Deadline) -> None:
        version = manifest.version
        try:
            verdicts = self._hear(f"{self._sequence}/done", f"version {version}: {{}} did not confirm it", deadline)
        except BaseException as error:  # how far whoever is silent has come, nobody knows
            self._end(str(error) or type(error).__name__, broken=True)
            raise
        self._refused(version, verdicts)

    def _refused(self, version: int, verdicts: Mapping[int, str]) -> None:
        """SyncError if anybody has refused it."""
        if wrong := [f"receiver {rank - 1}: {text}" for rank, text in verdicts.items() if text]:
            why = f"{self._meeting.mode}: version {version} was refused: {'; '.join(wrong)}"
            if any(text.startswith(BROKEN) for text in verdicts.values()):
                self._end(why, broken=True)
            raise SyncError(why)

    def _hear(self, key: str, failed: str, deadline: Deadline) -> dict[int, str]:
        """What every receiver says."""
        heard: dict[int, str] = {}
        ranks = range(1, self._meeting.world_size)
        for rank in ranks:
            try:
                heard[rank] = self._notes.read(f"{key}/{rank}", failed.format(f"receiver {rank - 1}"), deadline)
            except SyncTimeout:
                silent = [each - 1 for each in ranks if not self._notes.has(f"{key}/{each}")]
                who = f"receiver{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
                raise deadline.missed(failed.format(who)) from None
        return heard

    def _forget(self, sequence: int) -> None:
        """What nobody reads any more."""
        ranks = range(1, self._meeting.world_size)
        notes = [f"{sequence}/{note}/{rank}" for note in ("answer", "done") for rank in ranks]
        for key in (f"{sequence}/manifest", f"{sequence}/go", *notes):
            self._notes.store.delete_key(key)

    def _end(self, why: str, *, broken: bool) -> None:
        group, self._group, self._ended = self._group, None, self._ended or why
        self._memory = None
        if group is not None:
            group.close(broken=broken)


def way(mode: str, requested: Backend, device: torch.device, theirs: Sequence[str], *, roomy: bool) -> Way:
    """`theirs`: the device of each engine worker. `roomy`: the GPU has room for a second copy of what travels."""
    ours = device_name(device)
    if device.type == "cpu":
        if requested == "nccl":
            raise SyncError(f"{mode}: sync.backend = 'nccl': the trainer is on a CPU; use 'gloo' or 'ipc'")
        return Way(requested, "memory" if requested == "ipc" else "gloo")
    match requested:
        case "gloo":
            return Way(requested, "gloo")
        case "ipc":
            if odd := [each for each in theirs if each != ours]:
                raise SyncError(
                    f"{mode}: sync.backend = 'ipc': the trainer is on GPU {ours} and an engine on {odd[0] or 'none'}; "
                    "use 'nccl' or 'gloo'"
                )
            return Way(requested, "ipc")
        case "nccl":
            if why := _why_no_nccl(ours, theirs):
                raise SyncError(f"{mode}: sync.backend = 'nccl': {why}; use 'auto' or 'gloo'")
            return Way(requested, "nccl")
        case "auto":
            if roomy and set(theirs) == {ours}:
                return Way(requested, "ipc")
            why = _why_no_nccl(ours, theirs)
            return Way(requested, "gloo" if why else "nccl", why)


def _why_no_nccl(ours: str, theirs: Sequence[str]) -> str:
    if odd := [each for each in theirs if each in ("", "cpu")]:
        return f"an engine is on {odd[0] or 'a device that it does not name'}, and NCCL joins GPUs"
    if len({ours, *theirs}) < 1 + len(theirs):
        return "NCCL cannot have two of its ranks on one GPU"
    return ""
