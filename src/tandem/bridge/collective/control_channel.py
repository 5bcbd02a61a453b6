"""What both ends of a meeting say to each other besides the bytes: short notes, on a store that the trainer hosts.

They wait on the store, not in collectives: a collective that waits for its partner occupies a GPU, and cannot be told
to stop.
"""

from __future__ import annotations

import base64
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tandem.bridge.common.deadline import Deadline
from tandem.errors import SyncError

_T = TypeVar("_T")
BROKEN = "the transfer was broken off"
"""So begins the verdict of an engine that did not read to the end; with it the meeting ends."""
_LOOK_S = 0.0005
_SHORT, _AS_IT_IS = 2**16, "="  # characters; no base64 begins so
CLOSING_S = 1.0
_OWN = timedelta(seconds=30)  # to reach a store in this very process, which waits for nobody but a machine that is busy
WAY_OUT = "meet again with a new source(); neither process need be started anew"


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """All that the other process needs."""

    mode: str
    host: str
    port: int
    token: str
    """Nothing is found on the store without it: two meetings never mix."""
    generation: int
    world_size: int
    device: str
    """The trainer's: cpu, cuda."""
    deadline_s: float

    def to_link(self) -> dict[str, Any]:
        return asdict(self)

    def connect(self) -> TCPStore:
        return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=self._patience)

    def host_it(self, listening: socket.socket) -> TCPStore:
        """On the socket that is given: left to itself, the store would listen on every interface."""
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
    """One end's connection to the store. No call outlasts the deadline, even if the store's process is stopped."""

    def __init__(self, meeting: ChannelAddress, store: Store, *, mine: bool) -> None:
        """`mine`: the store is this process's own, and answers at once."""
        self._mode, self._mine = meeting.mode, mine
        self.store: Any = PrefixStore(f"{meeting.token}/{meeting.generation}", store)  # its stub lacks half of it

    def write(self, key: str, text: str, deadline: Deadline) -> None:
        self._call(lambda: self.store.set(key, _packed(text)), f"note '{key}' was not taken", deadline)

    def read(self, key: str, what_failed: str, deadline: Deadline) -> str:
        """Waits for it."""

        def waited_for() -> str:
            self.store.wait([key], _left(deadline))
            return _unpacked(self.store.get(key))

        if not self._mine:
            return self._call(waited_for, what_failed, deadline)
        # No thread is left in a wait that ends with the store, when the interpreter may be ending too.
        deadline.until(lambda: self.has(key), what_failed, every_s=_LOOK_S)
        return _unpacked(self._call(lambda: self.store.get(key), what_failed, deadline))

    def has(self, key: str) -> bool:
        return self.store.check([key])

    def heard(self, key: str, what_failed: str, deadline: Deadline) -> str:
        """What is there by now; nothing if it is not."""
        there = self._call(lambda: self.store.check([key]), what_failed, deadline)
        return self.read(key, what_failed, deadline) if there else ""

    def announce(self, sequence: int, text: str, what_failed: str, deadline: Deadline, *, claimable: bool) -> None:
        """By the trainer alone. `claimable`: who comes for it says so first, with `claim`."""
        told = {"latest": str(sequence)} | ({_unclaimed(sequence): ""} if claimable else {})
        self._tell(told | {f"{sequence}/manifest": _packed(text)}, what_failed, deadline)

    def close(self, sequence: int, why: str, deadline: Deadline) -> None:
        """After that announcement there will be none: whoever waits for the next one hears why."""
        told = {"latest": str(-sequence - 1), f"{sequence + 1}/manifest": _packed(why)}
        self._tell(told, "the meeting was not closed", deadline)

    def linger(self) -> None:
        """By the trainer, after `close`: its store stays until whoever waits there has read why."""
        timer = threading.Timer(CLOSING_S, lambda store: None, [self.store])
        timer.daemon = True
        timer.start()

    def _tell(self, notes: Mapping[str, str], what_failed: str, deadline: Deadline) -> None:
        """By one call. The store takes them in this order, and the last ones later if they come in another packet: what
        others wait for is the last."""
        self._call(lambda: self.store.multi_set([*notes], [*notes.values()]), what_failed, deadline)

    def newest(self, seen: int, what_failed: str, deadline: Deadline) -> tuple[int, str]:
        """The newest announcement after the one that was seen last; waits for it. What was left over before it is
        passed over. Less than 0: the meeting is closed, and this is why."""

        def found() -> tuple[int, str]:
            latest = self.store.add("latest", 0)
            while True:
                number = seen + 1 if 0 <= latest <= seen else abs(latest)
                self.store.wait([f"{number}/manifest"], _left(deadline))
                now, text = self.store.multi_get(["latest", f"{number}/manifest"])
                latest = int(now)
                if abs(latest) == number:
                    return latest, _unpacked(text)

        return self._call(found, what_failed, deadline)

    def claim(self, sequence: int, what_failed: str, deadline: Deadline, *, and_say: str = "") -> bool:
        """One end alone has it: an engine, which is about to read what was announced, or the trainer, which takes it
        back, and may write there again. `and_say`: that note at once, of an engine that has read it."""

        def claimed() -> bool:
            is_ours = self.store.delete_key(_unclaimed(sequence))
            if is_ours and and_say:
                deadline.check(what_failed)  # whoever asked is told that it failed: the trainer must not hear otherwise
                self.store.set(and_say, _packed(""))
            return is_ours

        return self._call(claimed, what_failed, deadline)

    def _call(self, function: Callable[[], _T], what_failed: str, deadline: Deadline) -> _T:
        with as_sync_errors(self._mode, what_failed, deadline):
            return function() if self._mine else deadline.call(function, what_failed)


@contextmanager
def as_sync_errors(mode: str, what_failed: str, deadline: Deadline) -> Iterator[None]:
    """Torch raises RuntimeError for all that can go wrong between processes."""
    try:
        yield
    except RuntimeError as error:
        if deadline.left_s < 0.01 or "timed out" in str(error).lower() or "timeout" in str(error).lower():
            raise deadline.missed(what_failed) from error
        raise SyncError(f"{mode}: {what_failed}: a partner was lost ({first_line(error)}); {WAY_OUT}") from error


@contextmanager
def told(mode: str, what_failed: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Whatever goes wrong in a transfer, `tell` hears why, before it is raised: the other end waits in it."""
    try:
        yield
    except RuntimeError as error:  # of this end's device: what goes wrong between the two is a SyncError already
        why = f"{mode}: {what_failed}: {first_line(error)}; {WAY_OUT}"
        tell(why)
        raise SyncError(why) from error
    except BaseException as error:
        tell(str(error) or type(error).__name__)
        raise


def _unclaimed(sequence: int) -> str:
    return f"{sequence}/unclaimed"


def _packed(text: str) -> str:
    if len(text) < _SHORT:
        return _AS_IT_IS + text
    return base64.b64encode(zlib.compress(text.encode(), 1)).decode()  # the store takes 8 MiB at most


def _unpacked(content: bytes) -> str:
    if content.startswith(_AS_IT_IS.encode()):
        return content[1:].decode()
    return zlib.decompress(base64.b64decode(content)).decode()


def _left(deadline: Deadline) -> timedelta:
    return timedelta(seconds=max(deadline.left_s, 0.001))


def first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text.partition("] ")[2] if text.startswith("[") and "] " in text else text  # gloo begins with a source file
