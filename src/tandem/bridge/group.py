"""The wire of collectives: notes over a store, tensors over a group that belongs to this meeting alone.

One version, between the trainer (T, rank 0) and every engine worker (E, ranks from 1):

    T  <seq>/manifest          what travels, with its digests; `latest` = seq
    E  <seq>/answer/<rank>     "" (it comes), or why not: another version is asked for
    T  <seq>/go                "" once everybody comes, or why not: until here nothing can hang that is not a note
    *  the group forms, once a meeting; the flat bytes travel in buckets
    E  <seq>/done/<rank>       "" (digests compared), or what is wrong with what arrived

Notes wait on the store, not in collectives: a collective that waits for its partner occupies a GPU, and cannot be told
to stop. Torch's NCCL group would end the whole process over a lost partner; here it may not.
"""

from __future__ import annotations

import base64
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from tandem.bridge.deadline import Deadline
from tandem.bridge.end import EngineEnd
from tandem.bridge.wire import Manifest, check
from tandem.errors import SyncError
from tandem.types import WeightKind, Weights

_T = TypeVar("_T")
CLOSED = -(10**9)
CLOSING_S = 1.0
WAY_OUT = "meet again with a new source(); neither process need be started anew"


@dataclass(frozen=True, slots=True)
class Meeting:
    """All that the other process needs."""

    mode: str
    host: str
    port: int
    token: str
    """Nothing is found on the store without it: two meetings never mix."""
    generation: int
    world_size: int
    device: str
    """cpu: gloo. cuda: NCCL."""
    deadline_s: float

    def to_link(self) -> dict[str, Any]:
        return asdict(self)

    def connect(self) -> TCPStore:
        return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=self._patience)

    def host_it(self, listening: socket.socket) -> TCPStore:
        """On the socket that is given: left to itself, the store would listen on every interface."""
        return TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=self._patience,
        )

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=self.deadline_s)


class Notes:
    """One end's connection to the store. No call outlasts the deadline, even if the store's process is stopped."""

    def __init__(self, meeting: Meeting, store: Store, *, mine: bool) -> None:
        """`mine`: the store is this process's own, and answers at once."""
        self._mode, self._mine = meeting.mode, mine
        self.store = PrefixStore(f"{meeting.token}/{meeting.generation}", store)

    def write(self, key: str, text: str, deadline: Deadline) -> None:
        content = base64.b64encode(zlib.compress(text.encode())).decode()  # the store takes 8 MiB at most
        self._call(lambda: self.store.set(key, content), f"note '{key}' was not taken", deadline)

    def read(self, key: str, what_failed: str, deadline: Deadline) -> str:
        """Waits for it."""
        if self._mine:  # no thread is left in a wait that ends with the store, when the interpreter may be ending too
            deadline.until(lambda: self.has(key), what_failed)
        else:
            left = timedelta(seconds=max(deadline.left_s, 0.001))
            self._call(lambda: self.store.wait([key], left), what_failed, deadline)
        content = self._call(lambda: self.store.get(key), what_failed, deadline)
        return zlib.decompress(base64.b64decode(content)).decode()

    def has(self, key: str) -> bool:
        return self.store.check([key])

    def count(self, what_failed: str, deadline: Deadline, more: int = 0) -> int:
        """Announcements so far; less than none: the meeting is closed."""
        return self._call(lambda: self.store.add("latest", more), what_failed, deadline)

    def _call(self, function: Callable[[], _T], what_failed: str, deadline: Deadline) -> _T:
        with as_sync_errors(self._mode, what_failed, deadline):
            return function() if self._mine else deadline.call(function, what_failed)


class Group:
    """The collectives of one rank in one meeting. What goes wrong in them ends the meeting."""

    def __init__(self, meeting: Meeting, rank: int, notes: Notes, device: torch.device, deadline: Deadline) -> None:
        self._meeting, self._device = meeting, device
        self._works: list[Any] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        form = self._form_nccl if device.type == "cuda" else self._form_gloo
        failed = f"the group of {meeting.world_size} did not form"
        store = PrefixStore("group", notes.store)
        with as_sync_errors(meeting.mode, failed, deadline):
            self._group: Any = deadline.call(lambda: form(store, rank), failed)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Kernels of the transfer have a stream of their own; what was computed before is waited for."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

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
            deadline.until(work.is_completed, what_failed)
        with as_sync_errors(self._meeting.mode, what_failed, deadline):
            work.wait()

    def finish(self, what_failed: str, deadline: Deadline) -> None:
        deadline.until(lambda: all(work.is_completed() for work in self._works), what_failed)
        for work in self._works:
            self.free(work, what_failed, deadline)
        self._works.clear()
        if self._stream is not None:
            ended = self._stream.record_event()
            deadline.until(ended.query, what_failed)

    def close(self, *, broken: bool) -> None:
        """Returns soon, whatever state the group is in. Deleting one with work in it would wait, and hold the
        interpreter meanwhile: a thread of its own does it when the work has ended."""
        ended = threading.Event()
        arguments = (self._group, self._works, self._stream is not None, broken, ended)
        threading.Thread(target=_bury, args=arguments, name="sync end", daemon=True).start()
        self._group, self._works = None, []
        ended.wait(CLOSING_S)

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


class GroupSource(EngineEnd):
    """The engine's end: one seat a worker."""

    def __init__(
        self, link: Mapping[str, Any], mode: str, carries: WeightKind, device: torch.device | None = None
    ) -> None:
        super().__init__(link, mode, carries)
        kinds = {"int": int, "float": float, "str": str}
        self._meeting = Meeting(**{each.name: self._need(each.name, kinds[str(each.type)]) for each in fields(Meeting)})
        if device is None:  # of the thread that opens the link: another thread's current device is the first one
            cuda = self._meeting.device.startswith("cuda")
            device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._device = device
        self._seats: dict[int, _Seat] = {}

    def receive(self, version: int, rank: int = 0) -> Weights:
        if not 0 <= rank < self._meeting.world_size - 1:
            raise SyncError(
                f"{self._mode}: receiver {rank} has no place at this meeting: it is of {self._meeting.world_size - 1}"
            )
        seat = self._seats.setdefault(rank, _Seat(self._meeting, rank, self._device))
        return seat.receive(version, self.carries, self.deadline())

    def close(self) -> None:
        super().close()
        for seat in self._seats.values():
            seat.close()


class _Seat:
    """One worker at a meeting."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        self._meeting, self._rank, self._device = meeting, rank + 1, device
        self._lock = threading.Lock()  # who gave up may still be waiting while it is asked anew
        self._notes: Notes | None = None
        self._group: Group | None = None
        self._seen, self._ended = 0, ""

    def receive(self, version: int, carries: WeightKind, deadline: Deadline) -> Weights:
        failed = f"version {version} was not sent"
        deadline.until(lambda: self._lock.acquire(blocking=False), failed)
        try:
            if self._ended:
                raise SyncError(f"{self._meeting.mode}: this meeting has ended: {self._ended}; {WAY_OUT}")
            if self._notes is None:
                self._notes = Notes(self._meeting, self._connect(failed, deadline), mine=False)
            sequence, manifest, flat = self._agree(self._notes, version, carries, failed, deadline)
            self._take(self._notes, manifest, flat, deadline)
            return self._confirm(self._notes, sequence, manifest, flat, deadline)
        finally:
            self._lock.release()

    def close(self) -> None:
        """After the source was given up, so that whoever receives is about to end."""
        if self._lock.acquire(timeout=CLOSING_S):
            self._end("it was closed", broken=False)
            self._lock.release()

    def _end(self, why: str, *, broken: bool) -> None:
        group, self._group, self._ended = self._group, None, self._ended or why
        if group is not None:
            group.close(broken=broken)

    def _connect(self, failed: str, deadline: Deadline) -> TCPStore:
        with as_sync_errors(self._meeting.mode, failed, deadline):
            return deadline.call(self._meeting.connect, failed)

    def _agree(
        self, notes: Notes, version: int, carries: WeightKind, failed: str, deadline: Deadline
    ) -> tuple[int, Manifest, Tensor]:
        """The announcement of that version, once everybody is there, and memory for what will come."""
        mode = self._meeting.mode
        while True:
            sequence = self._next(notes, failed, deadline)
            text = notes.read(f"{sequence}/manifest", failed, deadline)
            try:
                manifest = Manifest.from_text(text, mode)
            except SyncError as error:
                self._say(notes, f"{sequence}/answer", str(error), deadline)
                raise
            answer, flat = "", torch.empty(0)
            if manifest.version != version:
                answer = f"asked for version {version}, sent was {manifest.version}"
            elif manifest.kind != carries:
                answer = f"'{carries}' weights are expected, not '{manifest.kind}'"
            else:
                try:
                    flat = torch.empty(manifest.size_bytes, dtype=torch.uint8, device=self._device)
                except RuntimeError as error:  # here, and not while the others are already sending
                    answer = f"no memory for {manifest.size_bytes} bytes beside the old version: {_first_line(error)}"
            notes.write(f"{sequence}/answer/{self._rank}", answer, deadline)
            if answer and manifest.version >= version:
                raise SyncError(f"{mode}: {answer}")
            if not answer and not notes.read(f"{sequence}/go", failed, deadline):
                return sequence, manifest, flat

    def _next(self, notes: Notes, failed: str, deadline: Deadline) -> int:
        """The newest announcement, if this end has not seen it: what was left over before it is passed over."""
        latest = notes.count(failed, deadline)
        if 0 <= latest <= self._seen:
            notes.read(f"{self._seen + 1}/manifest", failed, deadline)
            latest = notes.count(failed, deadline)
        if latest < 0:
            raise SyncError(f"{self._meeting.mode}: {failed}: the trainer closed this meeting; {WAY_OUT}")
        self._seen = latest
        return latest

    def _take(self, notes: Notes, manifest: Manifest, flat: Tensor, deadline: Deadline) -> None:
        failed = f"version {manifest.version} did not arrive whole"
        try:
            if self._group is None:
                self._group = Group(self._meeting, self._rank, notes, self._device, deadline)
            with self._group.aside():
                for bucket in buckets_of(flat, manifest.bucket_bytes):
                    self._group.broadcast(bucket, deadline)
                self._group.finish(failed, deadline)
        except SyncError as error:
            self._end(str(error), broken=True)
            raise

    def _confirm(self, notes: Notes, sequence: int, manifest: Manifest, flat: Tensor, deadline: Deadline) -> Weights:
        def tensors() -> Iterator[tuple[str, Tensor]]:
            return ((name, entry.view(flat)) for name, entry in manifest.tensors.items())

        weights = Weights(
            manifest.version,
            manifest.kind,
            tensors,
            adapter=manifest.adapter,
            expected=manifest.fingerprints,
        )
        try:
            check(weights, self._meeting.mode)
        except SyncError as error:
            self._say(notes, f"{sequence}/done", str(error), deadline)
            raise
        notes.write(f"{sequence}/done/{self._rank}", "", deadline)
        return weights

    def _say(self, notes: Notes, key: str, what_is_wrong: str, deadline: Deadline) -> None:
        """To the sender, if it still listens; here it is raised in any case."""
        with suppress(SyncError):
            notes.write(f"{key}/{self._rank}", what_is_wrong, deadline)


def buckets_of(flat: Tensor, bucket_bytes: int) -> tuple[Tensor, ...]:
    return flat.split(bucket_bytes) if flat.numel() else ()


@contextmanager
def as_sync_errors(mode: str, what_failed: str, deadline: Deadline) -> Iterator[None]:
    """Torch raises RuntimeError for all that can go wrong between processes."""
    try:
        yield
    except RuntimeError as error:
        if deadline.left_s < 0.01 or "timed out" in str(error).lower() or "timeout" in str(error).lower():
            raise deadline.missed(what_failed) from error
        raise SyncError(f"{mode}: {what_failed}: a partner was lost ({_first_line(error)}); {WAY_OUT}") from error


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text.partition("] ")[2] if text.startswith("[") and "] " in text else text  # gloo begins with a source file


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
