"""Buckets by a collective, over a group that belongs to one meeting alone: NCCL between GPUs, gloo between CPUs.

Torch's NCCL group would end the whole process over a lost partner; here it may not.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from tandem.bridge.collective.control_channel import CLOSING_S, ChannelAddress, ControlChannel, as_sync_errors
from tandem.bridge.common.deadline import Deadline
from tandem.errors import SyncError

_LISTEN_S = 0.2


class SideStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What was computed before is waited for."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def settle(self, what_failed: str, deadline: Deadline) -> None:
        """All that was enqueued here has happened, for other processes too."""
        if self._stream is not None:
            deadline.until(self._stream.record_event().query, what_failed)


class Group(SideStream):
    """The collectives of one rank in one meeting. What goes wrong in them ends the meeting."""

    def __init__(
        self, meeting: ChannelAddress, rank: int, notes: ControlChannel, device: torch.device, deadline: Deadline
    ) -> None:
        super().__init__(device)
        self._meeting = meeting
        self._works: list[Any] = []
        self._keys: tuple[str, ...] = ()
        self._notes, self._next_look = notes, 0.0
        form = self._form_nccl if device.type == "cuda" else self._form_gloo
        failed = f"the group of {meeting.world_size} did not form"
        store = PrefixStore("group", notes.store)
        with as_sync_errors(meeting.mode, failed, deadline):
            self._group: Any = deadline.call(lambda: form(store, rank), failed)

    def buffers(self, count: int, size: int) -> list[Tensor]:
        return [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(count)]

    def within(self, raw: Tensor) -> Tensor:
        """These bytes, where they can travel from."""
        return raw.to(self._device)

    def listen(self, keys: Sequence[str]) -> None:
        """Where the other ends say that they broke off: a collective whose partner is gone need not end."""
        self._keys, self._next_look = tuple(keys), time.monotonic() + _LISTEN_S

    def broadcast(self, buffer: Tensor, deadline: Deadline) -> Any:
        """Rank 0's bytes, to everybody; returns at once."""
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        with as_sync_errors(self._meeting.mode, "a bucket was not taken", deadline):
            work = self._group.broadcast([buffer], options)
        self._works.append(work)
        return work

    def free(self, work: Any, what_failed: str, deadline: Deadline) -> None:
        """Its buffer may be filled again: on a GPU by what is enqueued from now on, else at once."""
        if self._stream is None:
            deadline.until(lambda: self._completed([work], what_failed, deadline), what_failed)
        with as_sync_errors(self._meeting.mode, what_failed, deadline):
            work.wait()

    def finish(self, what_failed: str, deadline: Deadline) -> None:
        deadline.until(lambda: self._completed(self._works, what_failed, deadline), what_failed)
        for work in self._works:
            self.free(work, what_failed, deadline)
        self._works.clear()
        self.settle(what_failed, deadline)

    def close(self, *, broken: bool) -> None:
        """Returns soon, whatever state the group is in. Deleting one with work in it would wait, and hold the
        interpreter meanwhile: a thread of its own does it when the work has ended."""
        ended = threading.Event()
        arguments = (self._group, self._works, self._stream is not None, broken, ended)
        threading.Thread(target=_bury, args=arguments, name="sync end", daemon=True).start()
        self._group, self._works = None, []
        ended.wait(CLOSING_S)

    def _completed(self, works: Sequence[Any], what_failed: str, deadline: Deadline) -> bool:
        if all(work.is_completed() for work in works):
            return True
        if time.monotonic() >= self._next_look:
            for key in self._keys:
                if why := self._notes.heard(key, what_failed, deadline):
                    raise SyncError(f"{self._meeting.mode}: {what_failed}: {why}")
            self._next_look = time.monotonic() + _LISTEN_S
        return False

    def _form_gloo(self, store: Store, rank: int) -> Any:
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        address = _address_towards(self._meeting.host, self._meeting.port)
        options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
        options._timeout = timedelta(seconds=self._meeting.deadline_s)
        return gloo(store, rank, self._meeting.world_size, options)

    def _form_nccl(self, store: Store, rank: int) -> Any:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            nccl: Any = c10d.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(seconds=10 * self._meeting.deadline_s)  # our deadline comes first, and aborts
            with _without_teardown():
                group = nccl(store, rank, self._meeting.world_size, options)
            # The communicator is made by its first collective, which blocks; so that happens here, where it may.
            first = group.broadcast([torch.zeros(1, dtype=torch.uint8, device=self._device)])
            first.wait()
            torch.cuda.current_stream().synchronize()
            return group


def _address_towards(host: str, port: int) -> str:
    """This machine's address as the other end of the meeting reaches it. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


@contextmanager
def _without_teardown() -> Iterator[None]:
    """Torch reads this when a group is made. By default its watchdog ends the process when a partner is lost."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _bury(group: Any, works: list[Any], is_nccl: bool, broken: bool, ended: threading.Event) -> None:
    with suppress(RuntimeError):  # it is over either way
        if is_nccl and broken:
            group.abort()  # kernels that wait for a dead partner stop
        elif is_nccl:
            group.shutdown()
    while not all(work.is_completed() for work in works):  # gloo's operations end with their own deadline
        time.sleep(0.05)
    works.clear()
    ended.set()
