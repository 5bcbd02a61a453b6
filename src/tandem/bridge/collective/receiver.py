"""The engine's end of `broadcast` and `adapter_broadcast`, and the order of messages between both ends.

One version, between the trainer (T, rank 0) and every engine worker (E, ranks from 1). Each line with a key is a
message on the control channel:

    T  places/<checksum>       where each tensor is in the flat bytes; written when that changes
    T  <seq>/manifest          which tensors travel, their digests and the transport; `latest` = seq
    E  <seq>/answer/<rank>     "" (the worker takes part), or why not: it was asked for another version
    T  <seq>/go                "" once every worker takes part, or why not. Until here only a message can be waited for
    T  <seq>/broken            why, if the trainer breaks off in the middle; the connection ends
    *  the flat bytes travel in buckets: over a group, formed once a connection, or through memory that both map
    E  <seq>/done/<rank>       "" (digests compared), or what is wrong with what arrived, or that it broke off. From a
                               worker that compares an adapter where it serves it, "" means that it is copied out

Where the trainer has several ranks, or a worker serves only a part of each tensor, tensors travel as boxes (boxes.py).
The ranks of the trainer are then the first of the group, and the receivers follow. rank_senders.py has the messages
between the ranks. For the receivers two more come before the manifest, and each gets its own boxes alone:

    T  boxes/<checksum>        what each rank holds and each receiver serves; written when that changes
    T  <seq>/expected/<rank>   the digest that each box of this receiver must have

and one at the end, for each of them has seen its own boxes alone:

    T  <seq>/all               "" (every receiver has the right boxes: it may serve them), or why not

Reading shared buffers cannot hang. So a version of one bucket for one worker is written before it is announced
(shared_buffers.py), and one round trip is enough:

    *  the trainer writes the flat bytes into the buffer
    T  <seq>/manifest, <seq>/unclaimed   as above; the manifest says `filled`
    E  claims it by deleting <seq>/unclaimed, then reads the buffer. If the trainer gave up and claimed it first, the
       worker waits for the next version. The worker may have read the buffer before its claim (prefetch.py)
    E  <seq>/done/<rank>       as above, or why the worker does not take the version
    T  <seq>/go                only to a worker that cannot map the buffer: whether it comes by another transport
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from tandem.bridge.collective.control_channel import (
    BROKEN,
    CLOSING_S,
    WAY_OUT,
    ChannelAddress,
    ControlChannel,
    as_sync_errors,
    first_line,
    reported,
)
from tandem.bridge.collective.prefetch import Prefetch, PrefetchedVersion
from tandem.bridge.collective.process_group import Group
from tandem.bridge.collective.shared_buffers import AGAIN, UNMAPPED, BufferReader, MappedBuffers
from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.manifest import EngineEndBase, Manifest, Placement, check, need
from tandem.bridge.common.packer import Flat
from tandem.errors import SyncError
from tandem.ops import digest
from tandem.types import WeightKind, Weights

if TYPE_CHECKING:
    from tandem.bridge.collective.boxes import BoxTables, StagedBoxes

_LISTENING_S = 3600.0  # for a version that the engine has not asked for yet


class GroupSource(EngineEndBase):
    """The engine's end: one receiver for each of its workers."""

    def __init__(
        self, link: Mapping[str, Any], mode: str, carries: WeightKind, device: torch.device | None = None
    ) -> None:
        super().__init__(link, mode, carries)
        self._address = ChannelAddress.from_link(link)
        self._first = need({"rank": 0, **link}, "rank", int, f"{mode}: the link")
        """This engine's first receiver, where the connection has several engines."""
        if (
            device is None
        ):  # chosen on the thread that opens the link: on another thread the current device is the first GPU
            cuda = self._address.device == "cuda" and torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._device = device
        self._workers: dict[int, _WorkerReceiver] = {}
        self._reuse = self._verify_where_served = False

    def reuse_buffer(self) -> bool:
        self._reuse = True
        return True

    def verify_where_served(self) -> bool:
        self._verify_where_served = True
        return True

    def receive(self, version: int, rank: int = 0) -> Weights:
        rank += self._first
        if not 0 <= rank < self._address.num_receivers:
            raise SyncError(
                f"{self._mode}: receiver {rank} is not part of this connection (size {self._address.num_receivers})"
            )
        worker = self._workers.setdefault(rank, _WorkerReceiver(self._address, rank, self._device))
        adapters = self.carries == "adapter"  # the memory of a whole model is needed for other things
        reuse, verify_where_served = adapters and self._reuse, adapters and self._verify_where_served
        return worker.receive(
            version, self.carries, self.deadline(), reuse=reuse, verify_where_served=verify_where_served
        )

    def prefetch(self, rank: int = 0) -> None:
        if self._reuse and (worker := self._workers.get(self._first + rank)) is not None:
            worker.prefetch(Deadline(self._mode, _LISTENING_S, self._given_up), self.deadline)

    def close(self) -> None:
        super().close()
        for worker in self._workers.values():
            worker.close()


class _Accepted(NamedTuple):
    """An announcement, and the buffer that its bytes will arrive in; `is_here`: they are in it, and claimed."""

    sequence: int
    manifest: Manifest
    flat: Flat | StagedBoxes
    is_here: bool


class _WorkerReceiver:
    """One worker's side of a connection."""

    def __init__(self, address: ChannelAddress, rank: int, device: torch.device) -> None:
        self._address, self._receiver, self._device = address, rank, device
        self._rank = address.senders + rank
        self._lock = threading.Lock()  # a call that gave up may still be waiting when the next one comes
        self._channel: ControlChannel | None = None
        self._group: Group | None = None
        self._mapped: MappedBuffers | None = None
        self._placement: Placement | None = None
        self._tables: BoxTables | None = None
        self._last: Flat | None = None
        self._listening: ControlChannel | None = None
        self._prefetched: Prefetch | None = None
        self._seen, self._ended = 0, ""

    def receive(
        self, version: int, carries: WeightKind, deadline: Deadline, *, reuse: bool, verify_where_served: bool
    ) -> Weights:
        failed = f"version {version} was not sent"
        deadline.until(lambda: self._lock.acquire(blocking=False), failed)
        try:
            if self._ended:
                raise SyncError(f"{self._address.mode}: this connection has ended: {self._ended}; {WAY_OUT}")
            if self._channel is None:
                self._channel = ControlChannel(self._address, self._connect(failed, deadline), mine=False)
            channel, verify = self._channel, not verify_where_served
            sequence, manifest, flat, is_here = self._accept(channel, version, carries, failed, deadline, verify=verify)
            if reuse and isinstance(flat, Flat):
                self._last = flat
            if not is_here:
                self._take(channel, sequence, manifest, flat, deadline)
            weights = Weights(
                version,
                manifest.kind,
                lambda: iter(flat),
                adapter=manifest.adapter,
                expected=manifest.digests,
                rows=None if isinstance(flat, Flat) or flat.is_whole else flat.parts,
            )
            if verify or not is_here:
                self._confirm(channel, sequence, weights, flat, deadline, verify=verify)
            return weights
        finally:
            self._lock.release()

    def prefetch(self, listening: Deadline, a_deadline: Callable[[], Deadline]) -> None:
        if self._address.num_receivers > 1 or not self._lock.acquire(blocking=False):
            return  # several workers must accept a version first; or a call that gave up still receives
        try:
            if self._prefetched is None and self._mapped is not None:
                self._prefetched = Prefetch(lambda: self._find(listening, a_deadline), self._device)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Call after the source was given up: a running receive is about to end."""
        if self._lock.acquire(timeout=CLOSING_S):
            self._end("it was closed", broken=False)
            self._prefetched = self._last = None
            self._lock.release()

    def _end(self, why: str, *, broken: bool) -> None:
        group, self._group, self._ended = self._group, None, self._ended or why
        self._mapped = None
        if group is not None:
            group.close(broken=broken)

    def _connect(self, failed: str, deadline: Deadline) -> TCPStore:
        with as_sync_errors(self._address.mode, failed, deadline):
            return deadline.call(self._address.connect, failed)

    def _accept(
        self,
        channel: ControlChannel,
        version: int,
        carries: WeightKind,
        failed: str,
        deadline: Deadline,
        *,
        verify: bool,
    ) -> _Accepted:
        """Return the announcement of that version once all receivers take part. A prefetched one is confirmed here,
        unless `verify`."""
        mode = self._address.mode
        while True:
            sequence, manifest, copied = self._next(channel, failed, deadline)
            self._last = copied or self._last
            done, answer, unmapped = f"{sequence}/done/{self._rank}", "", ""
            flat: Flat | StagedBoxes | None = None
            if manifest.version != version:
                answer = f"asked for version {version}, sent was {manifest.version}"
            elif manifest.kind != carries:
                answer = f"'{carries}' weights are expected, not '{manifest.kind}'"
            elif manifest.filled and not channel.claim(
                sequence, failed, deadline, then_write="" if verify or copied is None else done
            ):
                continue
            elif copied is not None:
                return _Accepted(sequence, manifest, copied, is_here=True)
            else:
                try:
                    self._map(manifest)
                    flat = (
                        self._boxes(channel, manifest, failed, deadline) if manifest.boxes else self._buffer(manifest)
                    )
                except SyncError as error:
                    answer = str(error) if manifest.boxes else f"{UNMAPPED}: {error}"
                    unmapped = "" if manifest.boxes else answer
                except RuntimeError as error:  # fail here, and not after the others have begun to send
                    answer = f"no memory for {manifest.size_bytes} bytes beside the old version: {first_line(error)}"
            if answer or not manifest.filled:
                channel.write(done if manifest.filled else f"{sequence}/answer/{self._rank}", answer, deadline)
            if unmapped and channel.read(f"{sequence}/go", failed, deadline) == AGAIN:
                continue
            if answer and manifest.version >= version:
                raise SyncError(f"{mode}: {answer}")
            if flat is not None and (manifest.filled or not channel.read(f"{sequence}/go", failed, deadline)):
                return _Accepted(sequence, manifest, flat, is_here=False)

    def _boxes(self, channel: ControlChannel, manifest: Manifest, failed: str, deadline: Deadline) -> StagedBoxes:
        """Return memory for this receiver's boxes."""
        from tandem.bridge.collective.boxes import BoxTables, StagedBoxes, forms_of  # no other version needs it

        self._tables = self._tables or BoxTables(self._address.mode)
        assert self._placement is not None
        forms = forms_of(self._placement)
        table = self._tables.read(manifest.boxes, forms, channel, failed, deadline)
        return StagedBoxes(table, self._receiver, self._device_of(manifest))

    def _buffer(self, manifest: Manifest) -> Flat:
        """Return a buffer for the version: the one of the version before if it is free and as large, else a new one."""
        assert self._placement is not None
        device, kept, self._last = self._device_of(manifest), self._last, None
        if kept is not None and kept.places is self._placement:
            there = len(kept.raw), kept.raw.device.type
            if there == (manifest.size_bytes, device.type):
                return kept
        return Flat(self._placement, manifest.size_bytes, device)

    def _device_of(self, manifest: Manifest) -> torch.device:
        """Return the device that the bytes arrive on."""
        return self._device if manifest.way in ("nccl", "ipc") else torch.device("cpu")

    def _map(self, manifest: Manifest) -> None:
        """Map the shared buffers of the manifest, once for all versions that use them."""
        if manifest.lent:
            handle = manifest.lent[self._rank - 1]
            if self._mapped is None or self._mapped.handle != handle:
                self._mapped = MappedBuffers(handle, self._address.token)
        else:
            self._mapped = None

    def _next(self, channel: ControlChannel, failed: str, deadline: Deadline) -> tuple[int, Manifest, Flat | None]:
        """Return the newest announcement that this end has not seen; or the prefetched one, which may be older."""
        if self._prefetched is not None:
            found = self._prefetched.found(failed, deadline)
            self._prefetched = None
            if self._ended:
                raise SyncError(f"{self._address.mode}: {failed}: {self._ended}; {WAY_OUT}")
            if found is not None:
                self._seen = found.sequence
                return found
        latest, text = self._newest(channel, failed, deadline)
        self._seen = latest
        try:
            return latest, self._read(channel, text, failed, deadline), None
        except SyncError as error:
            for key in ("answer", "done"):  # a damaged manifest does not tell which of them the trainer reads
                self._report(channel, f"{latest}/{key}", str(error), deadline)
            raise

    def _newest(self, channel: ControlChannel, failed: str, deadline: Deadline) -> tuple[int, str]:
        latest, text = channel.newest(self._seen, failed, deadline)
        if latest < 0:
            self._end(text, broken=False)
            raise SyncError(f"{self._address.mode}: {failed}: {text}; {WAY_OUT}")
        return latest, text

    def _read(self, channel: ControlChannel, text: str, failed: str, deadline: Deadline) -> Manifest:
        mode = self._address.mode

        def places(checksum: str) -> Placement:
            if self._placement is None or self._placement.checksum != checksum:
                reported = channel.read(f"places/{checksum}", failed, deadline)
                self._placement = Placement.from_text(reported, checksum, mode)
            return self._placement

        return Manifest.from_text(text, mode, places)

    def _find(self, listening: Deadline, a_deadline: Callable[[], Deadline]) -> PrefetchedVersion:
        """Prefetch the next version. Over a second connection: a store's client holds its one lock while it waits."""
        failed = "the next version was not announced"
        if self._listening is None:
            self._listening = ControlChannel(self._address, self._connect(failed, a_deadline()), mine=False)
        latest, text = self._newest(self._listening, failed, listening)
        deadline = a_deadline()
        manifest = self._read(self._listening, text, failed, deadline)
        if not manifest.filled:
            raise SyncError(f"{self._address.mode}: it must be answered first")
        self._map(manifest)
        flat = self._buffer(manifest)
        self._copy(self._carrier(self._listening, latest, manifest, deadline), manifest, flat.raw, failed, deadline)
        return PrefetchedVersion(latest, manifest, flat)

    def _take(
        self, channel: ControlChannel, sequence: int, manifest: Manifest, flat: Flat | StagedBoxes, deadline: Deadline
    ) -> None:
        failed = f"version {manifest.version} did not arrive completely"
        carrier: Group | BufferReader | None = None

        def break_off(why: str) -> None:
            if isinstance(carrier, BufferReader):
                carrier.break_off(why)
            self._report(channel, f"{sequence}/done", f"{BROKEN}: {why}", Deadline(self._address.mode, CLOSING_S))
            self._end(why, broken=True)

        with reported(self._address.mode, failed, break_off):
            carrier = self._carrier(channel, sequence, manifest, deadline)
            if isinstance(flat, Flat):
                self._copy(carrier, manifest, flat.raw, failed, deadline)
            else:
                assert isinstance(carrier, Group)
                with carrier.aside():
                    flat.receive(carrier, failed, deadline)

    def _copy(
        self, carrier: Group | BufferReader, manifest: Manifest, flat: Tensor, failed: str, deadline: Deadline
    ) -> None:
        with carrier.aside():
            for bucket in buckets_of(flat, manifest.bucket_bytes):
                carrier.broadcast(bucket, deadline)
            carrier.finish(failed, deadline)

    def _carrier(
        self, channel: ControlChannel, sequence: int, manifest: Manifest, deadline: Deadline
    ) -> Group | BufferReader:
        device = self._device_of(manifest)
        if manifest.lent:
            assert self._mapped is not None
            return BufferReader(self._mapped, device, channel, sequence, self._rank, filled=manifest.filled)
        if self._group is None:
            self._group = Group(self._address, self._rank, channel, device, deadline)
        self._group.listen([f"{sequence}/broken"])
        return self._group

    def _confirm(
        self,
        channel: ControlChannel,
        sequence: int,
        weights: Weights,
        flat: Flat | StagedBoxes,
        deadline: Deadline,
        *,
        verify: bool,
    ) -> None:
        try:
            if not isinstance(flat, Flat):
                failed = f"version {weights.version}: the digests of this receiver's boxes did not come"
                expected = channel.read(f"{sequence}/expected/{self._rank}", failed, deadline)
                flat.check(digest.parted(expected), f"{self._address.mode}: version {weights.version}")
            elif verify:
                check(weights, self._address.mode, flat.fingerprints())
        except SyncError as error:
            self._report(channel, f"{sequence}/done", str(error), deadline)
            raise
        channel.write(f"{sequence}/done/{self._rank}", "", deadline)
        if not isinstance(flat, Flat):  # another worker's boxes may be wrong: none serves the version then
            failed = f"version {weights.version}: the trainer did not say whether every worker has its boxes"
            if why := channel.read(f"{sequence}/all", failed, deadline):
                raise SyncError(f"{self._address.mode}: version {weights.version} will not be served: {why}")

    def _report(self, channel: ControlChannel, key: str, what_is_wrong: str, deadline: Deadline) -> None:
        """Tell the sender what is wrong, if it still listens. The caller raises in any case."""
        with suppress(SyncError):
            channel.write(f"{key}/{self._rank}", what_is_wrong, deadline)


def buckets_of(flat: Tensor, bucket_bytes: int) -> tuple[Tensor, ...]:
    return flat.split(bucket_bytes) if flat.numel() else ()
