"""Move buckets over a process group of one connection: NCCL between GPUs, gloo between CPUs.

A bucket goes from rank 0 to all (`broadcast`), or from one member to another (`exchange`). By default torch's NCCL
group ends the whole process when a partner is lost; here that is turned off.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from tandem.bridge.collective.control_channel import CLOSING_S, LOST, ChannelAddress, ControlChannel, as_sync_errors
from tandem.bridge.common.deadline import Deadline, run_on_thread
from tandem.errors import SyncError, SyncTimeout

LISTEN_S = 0.2
"""Between two looks at what other ends report."""


class Message(NamedTuple):
    """A buffer that goes to one other rank of the group, or comes from it."""

    buffer: Tensor
    peer: int


class SideStream:
    """Runs the kernels of a transfer on a CUDA stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run kernels on the side stream, after those that were launched before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def settle(self, what_failed: str, deadline: Deadline) -> None:
        """Wait until all kernels on this stream have run; then other processes see their results."""
        if self._stream is not None:
            deadline.until(self._stream.record_event().query, what_failed)


class Group(SideStream):
    """The collectives of one rank in one connection. An error in them ends the connection."""

    def __init__(
        self, address: ChannelAddress, rank: int, channel: ControlChannel, device: torch.device, deadline: Deadline
    ) -> None:
        super().__init__(device)
        self._address = address
        self._works: list[Any] = []
        self._keys: tuple[str, ...] = ()
        self._channel, self._next_look = channel, 0.0
        form = self._form_nccl if device.type == "cuda" else self._form_gloo
        failed = f"the group of {address.world_size} did not form"
        store = PrefixStore("group", channel.store)
        with as_sync_errors(address.mode, failed, deadline):
            self._group: Any = deadline.call(lambda: form(store, rank), failed)

    def buffers(self, count: int, size: int) -> list[Tensor]:
        return [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(count)]

    def within(self, raw: Tensor) -> Tensor:
        """Return these bytes on the device that the group sends from."""
        return raw.to(self._device)

    def listen(self, keys: Sequence[str]) -> None:
        """Watch these keys, where other ends report that they broke off: a collective without its partner may never
        end."""
        self._keys, self._next_look = tuple(keys), time.monotonic() + LISTEN_S

    def broadcast(self, buffer: Tensor, deadline: Deadline) -> Any:
        """Send rank 0's bytes to all ranks; return at once."""
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        with self._explained("a bucket was not taken", deadline):
            work = self._group.broadcast([buffer], options)
        self._works.append(work)
        return work

    def free(self, work: Any, what_failed: str, deadline: Deadline) -> None:
        """Wait until the buffer of `work` may be filled again: on a GPU by kernels launched from now on, else at
        once."""
        if self._stream is None:
            deadline.until(lambda: self._completed([work], what_failed, deadline), what_failed)
        with self._explained(what_failed, deadline):
            work.wait()

    def finish(self, what_failed: str, deadline: Deadline) -> None:
        deadline.until(lambda: self._completed(self._works, what_failed, deadline), what_failed)
        for work in self._works:
            self.free(work, what_failed, deadline)
        self._works.clear()
        self.settle(what_failed, deadline)

    def exchange(self, sent: Sequence[Message], received: Sequence[Message], deadline: Deadline) -> list[Any]:
        """Start to send and receive these buffers; return at once. On GPUs they travel together: one after the other,
        ranks could wait for each other in a ring."""
        on_gpu = self._stream is not None
        with self._explained("a bucket was not taken", deadline):
            if on_gpu:
                self._group._start_coalescing()
            works = [(self._group.send([buffer], peer, 0), peer) for buffer, peer in sent]
            works += [(self._group.recv([buffer], peer, 0), peer) for buffer, peer in received]
            begun = [self._group._end_coalescing()] if on_gpu else [_Waited(*each) for each in works]
        self._works += begun
        return begun

    def await_exchange(self, works: Sequence[Any], what_failed: str, deadline: Deadline) -> None:
        """Wait until the buffers of an exchange may be used again: on a GPU by kernels launched from now on."""
        if self._stream is None:

            def ended() -> bool:
                return any(work.failed for work in works) or self._completed(works, what_failed, deadline)

            try:
                deadline.until(ended, what_failed)
            except SyncTimeout:
                silent = sorted({self._address.member(each.peer) for each in works if not each.is_completed()})
                raise deadline.missed(f"{what_failed}, since {', '.join(silent)} stood still") from None
        for work in sorted(works, key=lambda each: not getattr(each, "failed", False)):
            peer = getattr(work, "peer", None)
            at = "" if peer is None else f" (with {self._address.member(peer)})"
            with self._explained(f"{what_failed}{at}", deadline):
                work.wait()

    def close(self, *, broken: bool) -> None:
        """End the group; return soon, whatever its state. Deleting a group with work in it would wait and hold the
        interpreter: a thread deletes it when the work has ended."""
        ended = threading.Event()
        arguments = (self._group, self._works, self._stream is not None, broken, ended)
        threading.Thread(target=_end_group, args=arguments, name="sync end", daemon=True).start()
        self._group, self._works = None, []
        ended.wait(CLOSING_S)

    def _completed(self, works: Sequence[Any], what_failed: str, deadline: Deadline) -> bool:
        if all(work.is_completed() for work in works):
            return True
        if time.monotonic() >= self._next_look:
            if told := self._told(what_failed, deadline):
                raise SyncError(f"{self._address.mode}: {what_failed}: {'; '.join(told)}")
            self._next_look = time.monotonic() + LISTEN_S
        return False

    def _told(self, what_failed: str, deadline: Deadline) -> list[str]:
        """Return what others report: first who broke off for a reason of its own, then those who miss it."""
        told = [self._channel.read_if_there(key, what_failed, deadline) for key in self._keys]
        return sorted(filter(None, told), key=lambda each: LOST in each)

    @contextmanager
    def _explained(self, what_failed: str, deadline: Deadline) -> Iterator[None]:
        """Turn torch's errors into ours. Who breaks off reports why before it closes its sockets, so a lost partner may
        be another's fault, and its report is there already."""
        try:
            with as_sync_errors(self._address.mode, what_failed, deadline):
                yield
        except SyncError as error:
            told = list[str]()
            with suppress(SyncError):
                told = self._told(what_failed, deadline)
            if told and LOST not in told[0]:
                raise SyncError(f"{self._address.mode}: {what_failed}: {'; '.join(told)}") from error
            raise

    def _form_gloo(self, store: Store, rank: int) -> Any:
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        address = _address_towards(self._address.host, self._address.port)
        options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
        options._timeout = timedelta(seconds=self._address.deadline_s)
        return gloo(store, rank, self._address.world_size, options)

    def _form_nccl(self, store: Store, rank: int) -> Any:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            nccl: Any = c10d.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(seconds=10 * self._address.deadline_s)  # our deadline comes first and aborts
            with _without_teardown():
                group = nccl(store, rank, self._address.world_size, options)
            # The first collective makes the communicator and blocks: so run one here, where that is allowed.
            first = group.broadcast([torch.zeros(1, dtype=torch.uint8, device=self._device)])
            first.wait()
            torch.cuda.current_stream().synchronize()
            return group


class _Waited:
    """A message by gloo: only a thread that waits for it learns that it has ended."""

    def __init__(self, work: Any, peer: int) -> None:
        self.peer = peer
        self._work, self._ended = work, threading.Event()
        self._error: RuntimeError | None = None
        run_on_thread(self._run)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._ended.set()


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address as the other end reaches it. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


@contextmanager
def _without_teardown() -> Iterator[None]:
    """Turn off the watchdog that ends the process when a partner is lost. Torch reads this when a group is made."""
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


def _end_group(group: Any, works: list[Any], is_nccl: bool, broken: bool, ended: threading.Event) -> None:
    with suppress(RuntimeError):  # the group ends either way
        if is_nccl and broken:
            group.abort()  # kernels that wait for a dead partner stop
        elif is_nccl:
            group.shutdown()
    while not all(work.is_completed() for work in works):  # gloo's operations end with their own deadline
        time.sleep(0.05)
    works.clear()
    ended.set()
