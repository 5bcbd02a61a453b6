"""Buckets by memory that both ends see, where trainer and engine are on one GPU, or on one host.

The memory is the trainer's: two rooms, which every engine's worker maps. Its handles are data, in the manifest. Of each
bucket, between the trainer (T) and every engine worker (E):

    T  <seq>/lent/<bucket>           "": it is written, and no kernel that writes it is still to run. Or why not
    E  <seq>/taken/<bucket>/<rank>   "": it is copied out, and no kernel that reads it is still to run. Or why not
    T  writes into that room again once all have said so

A version of one bucket, for one worker, needs none of these: the room is the trainer's own and nobody reads there, so
it is `filled` before the version is announced, and the worker's verdict says that it is copied out. Who is silent may
be reading, or come later. So a worker claims the announcement before it reads, and the trainer before it gives it up:
the store gives it to one of them. If the trainer has it, nobody will read that version, and the room may be written
again; if the worker has it, the meeting ends, and the room is never written again.

Rooms belong to one meeting. When one is broken off, nobody knows who still reads: its rooms are never written again,
and the next meeting has its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.collective.control_channel import CLOSING_S, ControlChannel
from tandem.bridge.collective.process_group import SideStream
from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.manifest import padded
from tandem.bridge.shared import cuda_ipc
from tandem.bridge.shared.memory import Segment
from tandem.errors import SyncError

UNMAPPED = "the trainer's memory cannot be mapped here"
"""So begins an engine's answer that cannot come that way."""
AGAIN = "again"
"""The trainer's answer: the same version comes by another way."""


class Unmapped(SyncError):
    """Memory that cannot be lent, or that an engine cannot map: another way may do."""


class SharedBuffers:
    """Of the trainer, for one meeting."""

    def __init__(self, name: str, device: torch.device, rooms: int, room_bytes: int, receivers: int) -> None:
        """`name`: whoever opens a handle finds it there, or refuses what it found."""
        self.room_bytes = padded(max(room_bytes, 1))
        if device.type == "cpu":
            forms = {str(n): torch.empty(self.room_bytes, dtype=torch.uint8, device="meta") for n in range(rooms)}
            segment = Segment.create(name, forms)
            self.rooms = list(segment.tensors.values())
            self.handles: list[Mapping[str, Any]] = [segment.handle] * receivers
            weakref.finalize(self, segment.close)  # its descriptor; the memory goes with the last who uses it
        else:
            try:
                whole = torch.zeros(rooms * self.room_bytes, dtype=torch.uint8, device=device)
                self.rooms = list(whole.split(self.room_bytes))
                named = {str(n): room for n, room in enumerate(self.rooms)}
                # A handle each: torch keeps the memory until every one of them was opened and let go.
                self.handles = [{"meeting": name, "cuda": cuda_ipc.export(named)} for _ in range(receivers)]
            except (SyncError, RuntimeError) as error:
                raise Unmapped(str(error)) from error


class Lending(SideStream):
    """The trainer's hand, for one version."""

    def __init__(
        self,
        memory: SharedBuffers,
        device: torch.device,
        notes: ControlChannel,
        sequence: int,
        receivers: int,
        *,
        filled: bool,
    ) -> None:
        """`filled`: before anybody is told of the version."""
        super().__init__(device)
        self._memory, self._notes, self._sequence, self._filled = memory, notes, sequence, filled
        self._ranks, self._lent, self._num_lent = range(1, receivers + 1), list[int](), 0

    def buffers(self, count: int, size: int) -> list[Tensor]:
        return [room[:size] for room in self._memory.rooms[:count]]

    def within(self, raw: Tensor) -> Tensor:
        """These bytes, in the room that is lent."""
        room = self._memory.rooms[0][: len(raw)]
        return room.copy_(raw)

    def broadcast(self, _: Tensor, deadline: Deadline) -> int:
        """Tells of it; returns at once."""
        bucket = self._num_lent
        self.settle(f"bucket {bucket} was not written", deadline)
        if self._filled:
            return bucket
        self._notes.write(f"{self._sequence}/lent/{bucket}", "", deadline)
        self._num_lent += 1
        self._lent.append(bucket)
        return bucket

    def free(self, bucket: int, what_failed: str, deadline: Deadline) -> None:
        if bucket not in self._lent:
            return
        taken = [f"{self._sequence}/taken/{bucket}/{rank}" for rank in self._ranks]
        for key in taken:
            if why := self._notes.read(key, what_failed, deadline):
                raise SyncError(f"{what_failed}: {why}")
        for key in (f"{self._sequence}/lent/{bucket}", *taken):
            self._notes.store.delete_key(key)
        self._lent.remove(bucket)

    def finish(self, what_failed: str, deadline: Deadline) -> None:
        for bucket in [*self._lent]:
            self.free(bucket, what_failed, deadline)

    def break_off(self, why: str) -> None:
        with suppress(SyncError):
            self._notes.write(f"{self._sequence}/lent/{self._num_lent}", why, Deadline("lent", CLOSING_S))


class Borrowed:
    """The trainer's memory, as an engine's worker sees it."""

    def __init__(self, handle: Mapping[str, Any], name: str) -> None:
        if handle.get("meeting") != name:
            raise SyncError(f"its handle is of meeting {handle.get('meeting')!r}, and this is {name!r}")
        self.handle = handle
        memory = cuda_ipc.Mapped(handle["cuda"]) if "cuda" in handle else Segment.open(handle)
        self.rooms = list(memory.tensors.values())


class Borrowing(SideStream):
    """An engine worker's hand, for one version."""

    def __init__(
        self, memory: Borrowed, device: torch.device, notes: ControlChannel, sequence: int, rank: int, *, filled: bool
    ) -> None:
        """`filled`: as `Lending` has it."""
        super().__init__(device)
        self._memory, self._notes, self._sequence, self._rank = memory, notes, sequence, rank
        self._filled, self._num_taken = filled, 0

    def broadcast(self, into: Tensor, deadline: Deadline) -> None:
        bucket = self._num_taken
        failed, taken = f"bucket {bucket} did not come", f"{self._sequence}/taken/{bucket}/{self._rank}"
        if not self._filled and (why := self._notes.read(f"{self._sequence}/lent/{bucket}", failed, deadline)):
            raise SyncError(f"{failed}: {why}")
        into.copy_(self._memory.rooms[bucket % len(self._memory.rooms)][: len(into)])
        if self._stream is not None:
            into.record_stream(self._stream)  # given up in the middle, it is nobody else's before the copy has ended
        self.settle(failed, deadline)  # it may be written into as soon as this is said
        if not self._filled:
            self._notes.write(taken, "", deadline)
        self._num_taken += 1

    def finish(self, what_failed: str, deadline: Deadline) -> None:
        """Each bucket was waited for."""

    def break_off(self, why: str) -> None:
        if self._filled:  # the verdict says it
            return
        with suppress(SyncError):
            self._notes.write(
                f"{self._sequence}/taken/{self._num_taken}/{self._rank}", why, Deadline("lent", CLOSING_S)
            )
