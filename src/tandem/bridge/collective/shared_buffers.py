"""Send buckets through memory that both ends map, where trainer and engine are on one GPU or one host.

The trainer owns the memory: two buffers, which every engine worker maps. The manifest has their handles as plain data.
The messages for each bucket, between the trainer (T) and every engine worker (E):

    T  <seq>/lent/<bucket>           "": the bucket is written, and all kernels that write it have run. Or why not
    E  <seq>/taken/<bucket>/<rank>   "": the bucket is copied out, and all kernels that read it have run. Or why not
    T  writes into that buffer again once all workers have answered

A version of one bucket for one worker needs none of these. No worker reads the buffer before the announcement, so the
trainer fills it first (`filled`), and the worker's verdict says that the bucket is copied out. A worker that does not
answer may be reading, or may come later. So a worker claims the announcement before it reads, and the trainer claims it
before it gives up; the store gives it to one of them. If the trainer has it, no worker will read that version, and the
trainer may write the buffer again. If the worker has it, the connection ends, and the buffer is never written again.

Buffers belong to one connection. After a transfer broke off, a worker may still be reading: the trainer never writes
those buffers again, and the next connection has its own.
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
"""The answer of an engine that cannot map the memory begins so."""
AGAIN = "again"
"""The trainer's answer: the same version comes again, by another transport."""


class Unmapped(SyncError):
    """Memory that cannot be shared, or that an engine cannot map: another transport may work."""


class SharedBuffers:
    """The trainer's buffers, for one connection."""

    def __init__(self, name: str, device: torch.device, count: int, buffer_bytes: int, receivers: int) -> None:
        """`name`: a receiver that opens a handle refuses memory with another name."""
        self.buffer_bytes = padded(max(buffer_bytes, 1))
        if device.type == "cpu":
            forms = {str(n): torch.empty(self.buffer_bytes, dtype=torch.uint8, device="meta") for n in range(count)}
            segment = Segment.create(name, forms)
            self.tensors = list(segment.tensors.values())
            self.handles: list[Mapping[str, Any]] = [segment.handle] * receivers
            weakref.finalize(self, segment.close)  # closes its descriptor; the memory is freed with its last user
        else:
            try:
                whole = torch.zeros(count * self.buffer_bytes, dtype=torch.uint8, device=device)
                self.tensors = list(whole.split(self.buffer_bytes))
                named = {str(n): buffer for n, buffer in enumerate(self.tensors)}
                # One handle for each receiver: torch keeps the memory until each was opened and released.
                self.handles = [{"meeting": name, "cuda": cuda_ipc.export(named)} for _ in range(receivers)]
            except (SyncError, RuntimeError) as error:
                raise Unmapped(str(error)) from error


class BufferWriter(SideStream):
    """Writes one version into the trainer's buffers."""

    def __init__(
        self,
        memory: SharedBuffers,
        device: torch.device,
        channel: ControlChannel,
        sequence: int,
        receivers: int,
        *,
        filled: bool,
    ) -> None:
        """`filled`: all of it is written before the version is announced."""
        super().__init__(device)
        self._memory, self._channel, self._sequence, self._filled = memory, channel, sequence, filled
        self._ranks, self._written, self._num_written = range(1, receivers + 1), list[int](), 0

    def buffers(self, count: int, size: int) -> list[Tensor]:
        return [buffer[:size] for buffer in self._memory.tensors[:count]]

    def within(self, raw: Tensor) -> Tensor:
        """Copy these bytes into the first buffer; return them there."""
        buffer = self._memory.tensors[0][: len(raw)]
        return buffer.copy_(raw)

    def broadcast(self, _: Tensor, deadline: Deadline) -> int:
        """Tell the workers that the next bucket is written; return at once."""
        bucket = self._num_written
        self.settle(f"bucket {bucket} was not written", deadline)
        if self._filled:
            return bucket
        self._channel.write(f"{self._sequence}/lent/{bucket}", "", deadline)
        self._num_written += 1
        self._written.append(bucket)
        return bucket

    def free(self, bucket: int, what_failed: str, deadline: Deadline) -> None:
        if bucket not in self._written:
            return
        taken = [f"{self._sequence}/taken/{bucket}/{rank}" for rank in self._ranks]
        for key in taken:
            if why := self._channel.read(key, what_failed, deadline):
                raise SyncError(f"{what_failed}: {why}")
        for key in (f"{self._sequence}/lent/{bucket}", *taken):
            self._channel.store.delete_key(key)
        self._written.remove(bucket)

    def finish(self, what_failed: str, deadline: Deadline) -> None:
        for bucket in [*self._written]:
            self.free(bucket, what_failed, deadline)

    def break_off(self, why: str) -> None:
        with suppress(SyncError):
            self._channel.write(f"{self._sequence}/lent/{self._num_written}", why, Deadline("lent", CLOSING_S))


class MappedBuffers:
    """The trainer's buffers, mapped by an engine worker."""

    def __init__(self, handle: Mapping[str, Any], name: str) -> None:
        if handle.get("meeting") != name:
            raise SyncError(f"its handle is of connection {handle.get('meeting')!r}, and this is {name!r}")
        self.handle = handle
        memory = cuda_ipc.Mapped(handle["cuda"]) if "cuda" in handle else Segment.open(handle)
        self.tensors = list(memory.tensors.values())


class BufferReader(SideStream):
    """Copies one version out of the mapped buffers."""

    def __init__(
        self,
        memory: MappedBuffers,
        device: torch.device,
        channel: ControlChannel,
        sequence: int,
        rank: int,
        *,
        filled: bool,
    ) -> None:
        """`filled`: as in `BufferWriter`."""
        super().__init__(device)
        self._memory, self._channel, self._sequence, self._rank = memory, channel, sequence, rank
        self._filled, self._num_taken = filled, 0

    def broadcast(self, into: Tensor, deadline: Deadline) -> None:
        bucket = self._num_taken
        failed, taken = f"bucket {bucket} did not come", f"{self._sequence}/taken/{bucket}/{self._rank}"
        if not self._filled and (why := self._channel.read(f"{self._sequence}/lent/{bucket}", failed, deadline)):
            raise SyncError(f"{failed}: {why}")
        into.copy_(self._memory.tensors[bucket % len(self._memory.tensors)][: len(into)])
        if self._stream is not None:
            into.record_stream(self._stream)  # after an error, its memory is not reused before the copy has ended
        self.settle(failed, deadline)  # the trainer may overwrite the bucket after the next message
        if not self._filled:
            self._channel.write(taken, "", deadline)
        self._num_taken += 1

    def finish(self, what_failed: str, deadline: Deadline) -> None:
        """Each bucket was waited for already."""

    def break_off(self, why: str) -> None:
        if self._filled:  # the verdict reports it
            return
        with suppress(SyncError):
            self._channel.write(
                f"{self._sequence}/taken/{self._num_taken}/{self._rank}", why, Deadline("lent", CLOSING_S)
            )
