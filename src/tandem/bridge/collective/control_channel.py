"""Short messages between the two ends of a transfer, on a key-value store that the trainer hosts.

Both ends wait on the store, not in collectives: a collective that waits for its partner occupies a GPU, and nothing can
stop it.
"""

from __future__ import annotations

import base64
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.manifest import need
from tandem.errors import SyncError

_T = TypeVar("_T")
BROKEN = "the transfer was broken off"
"""The verdict of an engine that did not read to the end begins so. It ends the connection."""
LOST = "a partner was lost"
_LOOK_S = 0.0005
_SHORT, _AS_IT_IS = 2**16, "="  # characters; no base64 text begins with "="
CLOSING_S = 1.0
_OWN = timedelta(seconds=30)  # to reach the store in this process: only a busy machine delays that
WAY_OUT = "connect again with a new source(); neither process needs a restart"


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """All that the other process needs to connect."""

    mode: str
    host: str
    port: int
    token: str
    """Part of every key on the store, so that two connections never mix."""
    generation: int
    world_size: int
    device: str
    """The trainer's: cpu, cuda."""
    deadline_s: float
    senders: int = 1
    """Ranks of the trainer: the first members of the group. The others are receivers."""

    def to_link(self) -> dict[str, Any]:
        link = asdict(self)
        if self.senders == 1:  # as releases know it whose trainer is one process
            del link["senders"]
        return link

    @classmethod
    def from_link(cls, link: Mapping[str, Any]) -> ChannelAddress:
        kinds = {"int": int, "float": float, "str": str}
        what = f"{link.get('mode')}: the link"
        whole = {"senders": 1, **link}
        return cls(**{each.name: need(whole, each.name, kinds[str(each.type)], what) for each in fields(cls)})

    @property
    def num_receivers(self) -> int:
        return self.world_size - self.senders

    def member(self, rank: int) -> str:
        """Return what messages call this member of the group."""
        return f"rank {rank} of the trainer" if rank < self.senders else f"receiver {rank - self.senders}"

    def connect(self) -> TCPStore:
        return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=self._patience)

    def host_it(self, listening: socket.socket) -> TCPStore:
        """Host the store on the given socket. By default the store would listen on every interface."""
        store = TCPStore(
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(),
            timeout=max(self._patience, _OWN),
        )  # fmt: skip
        store.set_timeout(self._patience)
        return store

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=self.deadline_s)


class ControlChannel:
    """One end's connection to the store. Every call ends with its deadline, even if the store's process is stopped."""

    def __init__(self, address: ChannelAddress, store: Store, *, mine: bool) -> None:
        """`mine`: this process hosts the store, so it answers at once."""
        self._mode, self._mine = address.mode, mine
        self.store: Any = PrefixStore(f"{address.token}/{address.generation}", store)  # its type stub is incomplete

    def write(self, key: str, text: str, deadline: Deadline) -> None:
        self._call(lambda: self.store.set(key, packed(text)), f"message '{key}' was not taken", deadline)

    def read(self, key: str, what_failed: str, deadline: Deadline) -> str:
        """Return the message at `key`; wait for it."""

        def waited_for() -> str:
            self.store.wait([key], _left(deadline))
            return unpacked(self.store.get(key))

        if not self._mine:
            return self._call(waited_for, what_failed, deadline)
        # Poll instead of waiting on a thread: the wait would end with the store, while the interpreter may be ending
        # too.
        deadline.until(lambda: self.has(key), what_failed, every_s=_LOOK_S)
        return unpacked(self._call(lambda: self.store.get(key), what_failed, deadline))

    def has(self, key: str) -> bool:
        return self.store.check([key])

    def read_if_there(self, key: str, what_failed: str, deadline: Deadline) -> str:
        """Return the message at `key`; empty if there is none yet."""
        is_there = self._call(lambda: self.store.check([key]), what_failed, deadline)
        return self.read(key, what_failed, deadline) if is_there else ""

    def announce(self, sequence: int, text: str, what_failed: str, deadline: Deadline, *, claimable: bool) -> None:
        """Announce a version; the trainer alone does. `claimable`: a receiver must `claim` it before it reads."""
        messages = {"latest": str(sequence)} | ({_unclaimed(sequence): ""} if claimable else {})
        self._set(messages | {f"{sequence}/manifest": packed(text)}, what_failed, deadline)

    def close(self, sequence: int, why: str, deadline: Deadline) -> None:
        """Announce that no more versions come, and why: receivers that wait for the next one read it."""
        messages = {"latest": str(-sequence - 1), f"{sequence + 1}/manifest": packed(why)}
        self._set(messages, "the connection was not closed", deadline)

    def linger(self) -> None:
        """Keep the trainer's store a little longer after `close`, so that waiting receivers can read why."""
        timer = threading.Timer(CLOSING_S, lambda store: None, [self.store])
        timer.daemon = True
        timer.start()

    def _set(self, messages: Mapping[str, str], what_failed: str, deadline: Deadline) -> None:
        """Write all of them by one call. The store sets them in this order, and the last ones may come later, in
        another packet: so the message that receivers wait for comes last."""
        self._call(lambda: self.store.multi_set([*messages], [*messages.values()]), what_failed, deadline)

    def newest(self, seen: int, what_failed: str, deadline: Deadline) -> tuple[int, str]:
        """Return the newest announcement after `seen`, and wait for it; older ones are skipped. A number below 0: the
        connection is closed, and the text says why."""

        def found() -> tuple[int, str]:
            latest = self.store.add("latest", 0)
            while True:
                number = seen + 1 if 0 <= latest <= seen else abs(latest)
                self.store.wait([f"{number}/manifest"], _left(deadline))
                now, text = self.store.multi_get(["latest", f"{number}/manifest"])
                latest = int(now)
                if abs(latest) == number:
                    return latest, unpacked(text)

        return self._call(found, what_failed, deadline)

    def claim(self, sequence: int, what_failed: str, deadline: Deadline, *, then_write: str = "") -> bool:
        """Claim an announcement; return whether this end got it. One end alone does: an engine that is about to read
        the bytes, or the trainer, which withdraws them and may write there again. `then_write`: a key that an engine
        which has read them already sets at once."""

        def claimed() -> bool:
            is_ours = self.store.delete_key(_unclaimed(sequence))
            if is_ours and then_write:
                deadline.check(what_failed)  # after it the caller gets an error, so the trainer must not read a success
                self.store.set(then_write, packed(""))
            return is_ours

        return self._call(claimed, what_failed, deadline)

    def _call(self, function: Callable[[], _T], what_failed: str, deadline: Deadline) -> _T:
        with as_sync_errors(self._mode, what_failed, deadline):
            return function() if self._mine else deadline.call(function, what_failed)


@contextmanager
def as_sync_errors(mode: str, what_failed: str, deadline: Deadline) -> Iterator[None]:
    """Turn torch's errors into ours: it raises RuntimeError for everything that fails between processes."""
    try:
        yield
    except RuntimeError as error:
        if deadline.left_s < 0.01 or "timed out" in str(error).lower() or "timeout" in str(error).lower():
            raise deadline.missed(what_failed) from error
        raise SyncError(f"{mode}: {what_failed}: {LOST} ({first_line(error)}); {WAY_OUT}") from error


@contextmanager
def reported(mode: str, what_failed: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` with the reason before an error of a transfer is raised: the other end still waits in it."""
    try:
        yield
    except RuntimeError as error:  # of this end's device: failures between the two ends are SyncErrors already
        why = f"{mode}: {what_failed}: {first_line(error)}; {WAY_OUT}"
        tell(why)
        raise SyncError(why) from error
    except BaseException as error:
        tell(str(error) or type(error).__name__)
        raise


def _unclaimed(sequence: int) -> str:
    return f"{sequence}/unclaimed"


def packed(text: str) -> str:
    if len(text) < _SHORT:
        return _AS_IT_IS + text
    return base64.b64encode(zlib.compress(text.encode(), 1)).decode()  # the store takes 8 MiB at most


def unpacked(content: bytes) -> str:
    if content.startswith(_AS_IT_IS.encode()):
        return content[1:].decode()
    return zlib.decompress(base64.b64decode(content)).decode()


def _left(deadline: Deadline) -> timedelta:
    return timedelta(seconds=max(deadline.left_s, 0.001))


def first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text.partition("] ")[2] if text.startswith("[") and "] " in text else text  # gloo begins with a source file
