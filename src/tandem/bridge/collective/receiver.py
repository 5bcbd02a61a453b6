"""The engine's end, and the order of things at a meeting. A seat is one worker's.

One version, between the trainer (T, rank 0) and every engine worker (E, ranks from 1):

    T  places/<checksum>       where in the flat bytes tensors lie: told when it is another than before
    T  <seq>/manifest          which of these travel, with their digests, and which way; `latest` = seq
    E  <seq>/answer/<rank>     "" (it comes), or why not: another version is asked for
    T  <seq>/go                "" once everybody comes, or why not: until here nothing can hang that is not a note
    T  <seq>/broken            why, if it stops in the middle; the meeting ends
    *  the flat bytes travel in buckets: by a group, which forms once a meeting, or by memory that both map
    E  <seq>/done/<rank>       "" (digests compared), or what is wrong with what arrived, or that it broke off. From a
                               worker that compares an adapter where it serves it, "" says that it is copied out

Nobody can hang in memory that is lent. So a version of one bucket, for one worker, is there before it is announced
(lent.py), and one round trip is all:

    *  the flat bytes are written into the room
    T  <seq>/manifest, <seq>/unclaimed   as above; the manifest says `filled`
    E  deletes <seq>/unclaimed and reads the room; or finds that the trainer, who had given up, did: the next may come.
       It may have read the room before it (lookahead.py)
    E  <seq>/done/<rank>       as above, or why it does not come
    T  <seq>/go                to a worker that cannot map the room alone: whether that version comes by another way
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any, NamedTuple

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
    told,
)
from tandem.bridge.collective.prefetch import LookAhead, PrefetchedVersion
from tandem.bridge.collective.process_group import Group
from tandem.bridge.collective.shared_buffers import AGAIN, UNMAPPED, Borrowed, Borrowing
from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.manifest import EngineEndBase, Manifest, Places, check
from tandem.bridge.common.packer import Flat
from tandem.errors import SyncError
from tandem.types import WeightKind, Weights

_LISTENING_S = 3600.0  # for a version that nobody has asked for yet


class GroupSource(EngineEndBase):
    """The engine's end: one seat a worker."""

    def __init__(
        self, link: Mapping[str, Any], mode: str, carries: WeightKind, device: torch.device | None = None
    ) -> None:
        super().__init__(link, mode, carries)
        kinds = {"int": int, "float": float, "str": str}
        self._meeting = ChannelAddress(
            **{each.name: self._need(each.name, kinds[str(each.type)]) for each in fields(ChannelAddress)}
        )
        if device is None:  # of the thread that opens the link: another thread's current device is the first one
            cuda = self._meeting.device == "cuda" and torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._device = device
        self._seats: dict[int, _Seat] = {}
        self._in_one_place = self._looks_itself = False

    def arrive_in_one_place(self) -> bool:
        self._in_one_place = True
        return True

    def looks_itself(self) -> bool:
        self._looks_itself = True
        return True

    def receive(self, version: int, rank: int = 0) -> Weights:
        if not 0 <= rank < self._meeting.world_size - 1:
            raise SyncError(
                f"{self._mode}: receiver {rank} has no place at this meeting: it is of {self._meeting.world_size - 1}"
            )
        seat = self._seats.setdefault(rank, _Seat(self._meeting, rank, self._device))
        adapters = self.carries == "adapter"  # the room of a whole model is needed for other things
        in_one_place, looks_itself = adapters and self._in_one_place, adapters and self._looks_itself
        return seat.receive(
            version, self.carries, self.deadline(), in_one_place=in_one_place, looks_itself=looks_itself
        )

    def look_ahead(self, rank: int = 0) -> None:
        if self._in_one_place and (seat := self._seats.get(rank)) is not None:
            seat.look_ahead(Deadline(self._mode, _LISTENING_S, self._given_up), self.deadline)

    def close(self) -> None:
        super().close()
        for seat in self._seats.values():
            seat.close()


class _Agreed(NamedTuple):
    """An announcement, and memory for what will come; or in which it is already, claimed."""

    sequence: int
    manifest: Manifest
    flat: Flat
    is_here: bool


class _Seat:
    """One worker at a meeting."""

    def __init__(self, meeting: ChannelAddress, rank: int, device: torch.device) -> None:
        self._meeting, self._rank, self._device = meeting, rank + 1, device
        self._lock = threading.Lock()  # who gave up may still be waiting while it is asked anew
        self._notes: ControlChannel | None = None
        self._group: Group | None = None
        self._borrowed: Borrowed | None = None
        self._places: Places | None = None
        self._kept: Flat | None = None
        self._listening: ControlChannel | None = None
        self._ahead: LookAhead | None = None
        self._seen, self._ended = 0, ""

    def receive(
        self, version: int, carries: WeightKind, deadline: Deadline, *, in_one_place: bool, looks_itself: bool
    ) -> Weights:
        failed = f"version {version} was not sent"
        deadline.until(lambda: self._lock.acquire(blocking=False), failed)
        try:
            if self._ended:
                raise SyncError(f"{self._meeting.mode}: this meeting has ended: {self._ended}; {WAY_OUT}")
            if self._notes is None:
                self._notes = ControlChannel(self._meeting, self._connect(failed, deadline), mine=False)
            notes, looked_at = self._notes, not looks_itself
            sequence, manifest, flat, is_here = self._agree(
                notes, version, carries, failed, deadline, looked_at=looked_at
            )
            if in_one_place:
                self._kept = flat
            if not is_here:
                self._take(notes, sequence, manifest, flat.raw, deadline)
            weights = Weights(
                version, manifest.kind, lambda: iter(flat), adapter=manifest.adapter, expected=manifest.digests
            )
            if looked_at or not is_here:
                self._confirm(notes, sequence, weights, flat, deadline, looked_at=looked_at)
            return weights
        finally:
            self._lock.release()

    def look_ahead(self, listening: Deadline, a_deadline: Callable[[], Deadline]) -> None:
        if self._meeting.world_size > 2 or not self._lock.acquire(blocking=False):
            return  # several workers have to agree first; or one that gave up still receives
        try:
            if self._ahead is None and self._borrowed is not None:
                self._ahead = LookAhead(lambda: self._find(listening, a_deadline), self._device)
        finally:
            self._lock.release()

    def close(self) -> None:
        """After the source was given up, so that whoever receives is about to end."""
        if self._lock.acquire(timeout=CLOSING_S):
            self._end("it was closed", broken=False)
            self._ahead = self._kept = None
            self._lock.release()

    def _end(self, why: str, *, broken: bool) -> None:
        group, self._group, self._ended = self._group, None, self._ended or why
        self._borrowed = None
        if group is not None:
            group.close(broken=broken)

    def _connect(self, failed: str, deadline: Deadline) -> TCPStore:
        with as_sync_errors(self._meeting.mode, failed, deadline):
            return deadline.call(self._meeting.connect, failed)

    def _agree(
        self,
        notes: ControlChannel,
        version: int,
        carries: WeightKind,
        failed: str,
        deadline: Deadline,
        *,
        looked_at: bool,
    ) -> _Agreed:
        """The announcement of that version, once everybody is there. What is here already is confirmed, unless it is to
        be looked at."""
        mode = self._meeting.mode
        while True:
            sequence, manifest, copied = self._next(notes, failed, deadline)
            self._kept = copied or self._kept
            done, answer, unmapped, flat = f"{sequence}/done/{self._rank}", "", "", None
            if manifest.version != version:
                answer = f"asked for version {version}, sent was {manifest.version}"
            elif manifest.kind != carries:
                answer = f"'{carries}' weights are expected, not '{manifest.kind}'"
            elif manifest.filled and not notes.claim(
                sequence, failed, deadline, and_say="" if looked_at or copied is None else done
            ):
                continue
            elif copied is not None:
                return _Agreed(sequence, manifest, copied, is_here=True)
            else:
                try:
                    self._borrow(manifest)
                    flat = self._room(manifest)
                except SyncError as error:
                    answer = unmapped = f"{UNMAPPED}: {error}"
                except RuntimeError as error:  # here, and not while the others are already sending
                    answer = f"no memory for {manifest.size_bytes} bytes beside the old version: {first_line(error)}"
            if answer or not manifest.filled:
                notes.write(done if manifest.filled else f"{sequence}/answer/{self._rank}", answer, deadline)
            if unmapped and notes.read(f"{sequence}/go", failed, deadline) == AGAIN:
                continue
            if answer and manifest.version >= version:
                raise SyncError(f"{mode}: {answer}")
            if flat is not None and (manifest.filled or not notes.read(f"{sequence}/go", failed, deadline)):
                return _Agreed(sequence, manifest, flat, is_here=False)

    def _room(self, manifest: Manifest) -> Flat:
        """In the memory of the version before, if that is as large, and nobody needs it any more."""
        assert self._places is not None
        device, kept, self._kept = self._device_of(manifest), self._kept, None
        if kept is not None and kept.places is self._places:
            there = len(kept.raw), kept.raw.device.type
            if there == (manifest.size_bytes, device.type):
                return kept
        return Flat(self._places, manifest.size_bytes, device)

    def _device_of(self, manifest: Manifest) -> torch.device:
        """Where its bytes arrive."""
        return self._device if manifest.way in ("nccl", "ipc") else torch.device("cpu")

    def _borrow(self, manifest: Manifest) -> None:
        """The memory that it comes by, mapped once for all versions that do."""
        if manifest.lent:
            handle = manifest.lent[self._rank - 1]
            if self._borrowed is None or self._borrowed.handle != handle:
                self._borrowed = Borrowed(handle, self._meeting.token)
        else:
            self._borrowed = None

    def _next(self, notes: ControlChannel, failed: str, deadline: Deadline) -> tuple[int, Manifest, Flat | None]:
        """The newest announcement, if this end has not seen it; or one that was copied, which may be an older one."""
        if self._ahead is not None:
            found = self._ahead.found(failed, deadline)
            self._ahead = None
            if self._ended:
                raise SyncError(f"{self._meeting.mode}: {failed}: {self._ended}; {WAY_OUT}")
            if found is not None:
                self._seen = found.sequence
                return found
        latest, text = self._newest(notes, failed, deadline)
        self._seen = latest
        try:
            return latest, self._read(notes, text, failed, deadline), None
        except SyncError as error:
            for key in ("answer", "done"):  # it does not say which one is waited for
                self._say(notes, f"{latest}/{key}", str(error), deadline)
            raise

    def _newest(self, notes: ControlChannel, failed: str, deadline: Deadline) -> tuple[int, str]:
        latest, text = notes.newest(self._seen, failed, deadline)
        if latest < 0:
            self._end(text, broken=False)
            raise SyncError(f"{self._meeting.mode}: {failed}: {text}; {WAY_OUT}")
        return latest, text

    def _read(self, notes: ControlChannel, text: str, failed: str, deadline: Deadline) -> Manifest:
        mode = self._meeting.mode

        def places(checksum: str) -> Places:
            if self._places is None or self._places.checksum != checksum:
                told = notes.read(f"places/{checksum}", failed, deadline)
                self._places = Places.from_text(told, checksum, mode)
            return self._places

        return Manifest.from_text(text, mode, places)

    def _find(self, listening: Deadline, a_deadline: Callable[[], Deadline]) -> PrefetchedVersion:
        """By a connection of its own: a store's client has one lock, and holds it while it waits."""
        failed = "the next version was not announced"
        if self._listening is None:
            self._listening = ControlChannel(self._meeting, self._connect(failed, a_deadline()), mine=False)
        latest, text = self._newest(self._listening, failed, listening)
        deadline = a_deadline()
        manifest = self._read(self._listening, text, failed, deadline)
        if not manifest.filled:
            raise SyncError(f"{self._meeting.mode}: it has to be answered first")
        self._borrow(manifest)
        flat = self._room(manifest)
        self._copy(self._carrier(self._listening, latest, manifest, deadline), manifest, flat.raw, failed, deadline)
        return PrefetchedVersion(latest, manifest, flat)

    def _take(self, notes: ControlChannel, sequence: int, manifest: Manifest, flat: Tensor, deadline: Deadline) -> None:
        failed = f"version {manifest.version} did not arrive whole"
        carrier: Group | Borrowing | None = None

        def break_off(why: str) -> None:
            if isinstance(carrier, Borrowing):
                carrier.break_off(why)
            self._say(notes, f"{sequence}/done", f"{BROKEN}: {why}", Deadline(self._meeting.mode, CLOSING_S))
            self._end(why, broken=True)

        with told(self._meeting.mode, failed, break_off):
            carrier = self._carrier(notes, sequence, manifest, deadline)
            self._copy(carrier, manifest, flat, failed, deadline)

    def _copy(
        self, carrier: Group | Borrowing, manifest: Manifest, flat: Tensor, failed: str, deadline: Deadline
    ) -> None:
        with carrier.aside():
            for bucket in buckets_of(flat, manifest.bucket_bytes):
                carrier.broadcast(bucket, deadline)
            carrier.finish(failed, deadline)

    def _carrier(
        self, notes: ControlChannel, sequence: int, manifest: Manifest, deadline: Deadline
    ) -> Group | Borrowing:
        device = self._device_of(manifest)
        if manifest.lent:
            assert self._borrowed is not None
            return Borrowing(self._borrowed, device, notes, sequence, self._rank, filled=manifest.filled)
        if self._group is None:
            self._group = Group(self._meeting, self._rank, notes, device, deadline)
        self._group.listen([f"{sequence}/broken"])
        return self._group

    def _confirm(
        self, notes: ControlChannel, sequence: int, weights: Weights, flat: Flat, deadline: Deadline, *, looked_at: bool
    ) -> None:
        try:
            if looked_at:
                check(weights, self._meeting.mode, flat.fingerprints())
        except SyncError as error:
            self._say(notes, f"{sequence}/done", str(error), deadline)
            raise
        notes.write(f"{sequence}/done/{self._rank}", "", deadline)

    def _say(self, notes: ControlChannel, key: str, what_is_wrong: str, deadline: Deadline) -> None:
        """To the sender, if it still listens; here it is raised in any case."""
        with suppress(SyncError):
            notes.write(f"{key}/{self._rank}", what_is_wrong, deadline)


def buckets_of(flat: Tensor, bucket_bytes: int) -> tuple[Tensor, ...]:
    return flat.split(bucket_bytes) if flat.numel() else ()
