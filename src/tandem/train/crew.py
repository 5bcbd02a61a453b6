"""The processes that train one policy together (ranks), as one of them sees the others.

Rank 0 is the run. The other ranks wait for its orders, and every rank has the same handlers, by name:

    rank 0                        ranks 1 to N-1
    order/7 = {name, arguments} -> all of them read it
    runs its own handler           run theirs; inside, collectives are allowed
    answer/7/1, answer/7/2      <- their return values
    returns all answers

Orders and answers are JSON in a TCPStore: a wait in a store ends at its deadline, a collective with a process that
stands still does not. Tensors go through `group` (gloo, on GPUs nccl too), inside an order only.

Every rank writes a sign of life five times a second, from a thread of its own, and looks at `failed`: who fails writes
there why, before it ends. Rank 0 also judges the signs of the others. Once one rank is lost, all end: a crew that lacks
a rank can neither train nor save.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tandem import errors
from tandem.errors import CheckpointUnsaved, EngineError, RankLost, SyncError

_log = logging.getLogger(__name__)

Handler = Callable[..., Any]

BEAT_S = 0.2
_PREFIX = "tandem"
_FEW_BEATS_S = 3.0
"""Without a sign of life for so long, a rank is suspected once something else has failed."""
_EXPLAIN_S = 6.0
"""After a collective has failed: most seconds until the cause is known."""
_MEET_S = 600.0
_LONG = timedelta(days=365)
_EXIT_LOST = 1
_TEXT = 2000


def call_off(store: Any) -> None:
    """Rank 0: let the ranks that wait for it go; there is nothing to train."""
    _prefixed(store).set("host/0", "")


def refuse(store: Any, rank: int, error: Exception) -> None:
    """Another rank than 0, before it has met the others: let those that wait for it end, and say why."""
    _write_failed(_prefixed(store), rank, socket.gethostname(), type(error).__name__, str(error))


def _write_failed(store: Any, rank: int, host: str, kind: str, text: str) -> None:
    told = {"rank": rank, "host": host, "class": kind, "text": text[:_TEXT]}
    store.compare_set("failed", "", json.dumps(told))


def _prefixed(store: Any) -> Any:
    return dist.PrefixStore(_PREFIX, store)  # pyright: ignore[reportPrivateImportUsage]


class Children(Protocol):
    """The processes of the other ranks, where rank 0 has started them."""

    def ended(self) -> Mapping[int, str]: ...  # of those that have ended: how
    def sign(self, rank: int) -> tuple[str, float] | None: ...  # changes while it starts; and for how long it has not
    def kill(self) -> None: ...  # all, at once


class Crew:
    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        *,
        device: torch.device,
        deadline_s: float,
        children: Children | None = None,
    ) -> None:
        """Wait until all ranks are there. `deadline_s`: of a rank that shows no life, or no progress in an order."""
        self.rank, self.ranks, self.device = rank, ranks, device
        self.host = socket.gethostname()
        self.timeout = timedelta(seconds=deadline_s)
        self.row_shards = ranks
        """Into how many runs of rows tensors are cut: ranks that are so far apart hold the same rows. Rank 0's spec
        says it, at `begin`."""
        self.gathers_for = self.sums = ""
        """What became of parallel.gather and of parallel.sums, once there is a policy."""
        self._deadline_s, self._children = deadline_s, children
        self._handlers: dict[str, Handler] = {}
        self._ordering = threading.Lock()
        self._ordering_thread = 0
        self._order = self._done = self._mine_done = self._ticks = self._gathered = 0
        self._broken = self._failed_here = ""
        self._waiting: Sequence[str] = ()
        self._ended = False
        self._asked_to_end_at = 0.0
        self.hosts: list[str] = []
        """The name of each rank's host, once all are there."""
        self._store = _prefixed(store)
        watcher = _Watcher(self)
        threading.Thread(target=watcher.guard, name="crew", daemon=True).start()  # before the store is asked anything
        self._watched = self._store.clone()  # a wait of one thread holds its client
        self._set(f"host/{rank}", self.host)
        self._set(f"alive/{rank}", self._sign(0))
        threading.Thread(target=watcher.run, args=(self._watched,), name="crew", daemon=True).start()
        if not self._get("host/0"):
            raise SystemExit(0)  # rank 0 has nothing to train
        self._wait([f"host/{each}" for each in range(ranks)], _MEET_S)
        self.hosts = [self._get(f"host/{each}") for each in range(ranks)]
        watcher.all_there = True
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=ranks, timeout=self.timeout,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        self.group: Any = dist.group.WORLD
        self.groups: list[Any] = [self.group]
        """All process groups in whose collectives this rank may wait. When a rank is lost, they are aborted."""

    # --- orders

    def handle(self, name: str, handler: Handler) -> None:
        """Register what this rank does at an order of this name; the same name again replaces it."""
        self._handlers[name] = handler

    def order(self, name: str, **what: Any) -> list[Any]:
        """Rank 0: have every rank do it; return the answers in the order of ranks. The first is rank 0's own result."""
        assert self.rank == 0, "orders are given by rank 0"
        self._take_turn(name)
        try:
            return self._ordered(name, what)
        finally:
            self._ordering_thread = 0
            self._ordering.release()

    def _ordered(self, name: str, what: Mapping[str, Any]) -> list[Any]:
        self._refuse_if_broken()
        self._order += 1
        number, gathered = self._order, self._gathered
        told = {"name": name, "what": what}
        self._set(f"order/{number}", json.dumps(told))
        failure: BaseException | None = None
        mine: Any = None
        try:
            mine = self._handlers[name](**what)
        except (SyncError, EngineError) as error:
            failure = error
        except BaseException as error:
            raise self._explained(error) from error
        self._mine_done = number
        answers = [mine, *(self._answer(number, rank) for rank in range(1, self.ranks))]
        self._refuse_if_broken()
        self._done = number
        self._forget(number, gathered)
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers[1:], 1):
            if "error" in answer:
                raise getattr(errors, answer["error"], SyncError)(f"{self._called(rank)}: {answer['text']}")
        return [mine, *(answer["value"] for answer in answers[1:])]

    def _take_turn(self, name: str) -> None:
        """One order at a time. A signal's handler may come in the middle of one: it must not wait for it."""
        mine = threading.get_ident()
        if self._ordering_thread == mine or not self._ordering.acquire(timeout=self._deadline_s):
            raise CheckpointUnsaved(f"crew: another order is under way, so '{name}' cannot be done now")
        self._ordering_thread = mine

    def follow(self) -> None:
        """The other ranks: do what is ordered until the order is `end`."""
        while True:
            number = self._done + 1
            told = json.loads(self._get(f"order/{number}", timeout_s=None))
            self._order = number
            if told["name"] == "end":
                self._ended = True
                return
            try:
                answer = {"value": self._handlers[told["name"]](**told["what"])}
            except (SyncError, EngineError) as error:
                answer = {"error": type(error).__name__, "text": str(error)}
            self._set(f"answer/{number}/{self.rank}", json.dumps(answer))
            self._done = number

    def gather(self, value: Any) -> list[Any]:
        """Inside an order, called by all ranks: a small JSON value of each, in the order of ranks."""
        self._gathered += 1
        keys = [f"gather/{self._gathered}/{rank}" for rank in range(self.ranks)]
        self._set(keys[self.rank], json.dumps(value))
        self._wait(keys)
        return [json.loads(self._get(key)) for key in keys]

    def share(self, data: Tensor | None, size: int) -> Tensor:
        """Inside an order, called by all ranks: the bytes that rank 0 has, on every rank."""
        data = torch.empty(size, dtype=torch.uint8) if data is None else data
        dist.broadcast(data, 0, group=self.group)
        return data

    def board(self) -> Any:
        """A client of the ranks' store for another thread: a wait of one thread holds its client."""
        return self._store.clone()

    def tick(self) -> None:
        """A sign of progress within an order."""
        self._ticks += 1

    # --- ends

    def close(self) -> None:
        """Rank 0: let the others go. After a failure they have gone already, or go now."""
        if self._ended:
            return
        if not self._broken and not self._failed_here and self._order == self._done and not self._ordering.locked():
            self._set(f"order/{self._order + 1}", json.dumps({"name": "end"}))
        else:
            self._tell_failed(0, "Ended", "the run ended")
        self._ended = True

    def fail(self, error: BaseException) -> NoReturn:
        """Another rank than 0: say why, and end. An error of a collective is the failure of another rank."""
        text = f"{type(error).__name__}: {error}"
        _log.error("rank %d: %s", self.rank, text, exc_info=error)
        with suppress(Exception):
            if _is_of_a_collective(error):
                self._set(f"stranded/{self.rank}", text[:_TEXT])
                until = time.monotonic() + 2 * _EXPLAIN_S
                while time.monotonic() < until and not self._watched_failed():
                    time.sleep(BEAT_S)
            else:
                self._tell_failed(self.rank, type(error).__name__, str(error))
        os._exit(_EXIT_LOST)

    @property
    def broken(self) -> str:
        """Which rank is lost and why; empty while none is."""
        return self._broken

    def lost_by_now(self) -> str:
        """Rank 0, on any thread: return which rank is lost; empty once all others have shown a sign of life since the
        call. A rank that shows none for a few seconds is lost."""
        if self._broken:
            return self._broken
        board = self.board()
        silent = {rank: board.get(f"alive/{rank}") for rank in range(1, self.ranks)}
        until = time.monotonic() + _EXPLAIN_S
        while silent and not self._broken:
            time.sleep(BEAT_S / 4)
            silent = {rank: sign for rank, sign in silent.items() if board.get(f"alive/{rank}") == sign}
            if silent and time.monotonic() > until:
                self.lost(min(silent), f"shows no sign of life for {_EXPLAIN_S:g} s (it has died or stands still)")
        return self._broken

    def ask_to_end(self) -> None:
        """Another rank than 0 got SIGTERM: rank 0 decides when the run ends, as long as it lives."""
        self._asked_to_end_at = self._asked_to_end_at or time.monotonic()

    # --- within

    def _answer(self, number: int, rank: int) -> dict[str, Any]:
        return json.loads(self._get(f"answer/{number}/{rank}", timeout_s=None))

    def _forget(self, number: int, gathered: int) -> None:
        """Every rank has read what this order wrote into the store."""
        others = range(1, self.ranks)
        gone = [f"order/{number}", *(f"answer/{number}/{rank}" for rank in others)]
        gone += [f"gather/{each + 1}/{rank}" for each in range(gathered, self._gathered) for rank in range(self.ranks)]
        for key in gone:
            self._store.delete_key(key)

    def _explained(self, error: BaseException) -> BaseException:
        """Rank 0's own error breaks the crew; one of a collective is told as what caused it."""
        if isinstance(error, RankLost) or not _is_of_a_collective(error):
            self._failed_here = f"{type(error).__name__}: {error}"
            self._tell_failed(0, type(error).__name__, str(error))
            return error
        until = time.monotonic() + _EXPLAIN_S
        while time.monotonic() < until and not self._broken:
            time.sleep(BEAT_S / 4)
        if not self._broken:
            self.lost(0, f"{type(error).__name__}: {error}")
        return RankLost(self._broken)

    def lost(self, rank: int, why: str, host: str = "") -> None:
        """This rank is lost: no order is given any more, and every process of the crew ends."""
        self._broken = self._broken or f"rank {rank} on host {host or self._host_of(rank)}: {why}"
        self._tell_failed(rank, "RankLost", why)
        with suppress(Exception):
            for key in self._waiting:
                self._watched.compare_set(key, "", "{}")
        if self._children is not None:
            self._children.kill()  # their sockets close, so that a collective of ours ends
        if self.device.type == "cuda":
            abort_all(self.groups, self.device)

    def _refuse_if_broken(self) -> None:
        if self._broken or self._failed_here:
            raise RankLost(self._broken or f"{self._called(0)}: {self._failed_here}")

    def _called(self, rank: int) -> str:
        return f"rank {rank} on host {self._host_of(rank)}"

    def _host_of(self, rank: int) -> str:
        return self.hosts[rank] if self.hosts else self.host

    def _sign(self, beat: int) -> str:
        return f"{beat} {self._order} {self._done} {self._ticks}"

    def _tell_failed(self, rank: int, kind: str, text: str) -> None:
        with suppress(Exception):
            _write_failed(self._watched, rank, self._host_of(rank), kind, text)

    def _watched_failed(self) -> bool:
        return bool(self._watched.check(["failed"]))

    def _set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def _get(self, key: str, timeout_s: float | None = _MEET_S) -> str:
        self._wait([key], timeout_s)
        return self._store.get(key).decode()

    def _wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Until all are there. When the crew breaks, the watcher writes those that are missing."""
        self._waiting = keys
        try:
            self._refuse_if_broken()
            self._store.wait(list(keys), _LONG if timeout_s is None else timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            missing = [key for key in keys if not self._store.check([key])]
            raise RankLost(f"{', '.join(missing)}: not there within {timeout_s:g} s") from error
        finally:
            self._waiting = ()
        self._refuse_if_broken()


def abort_all(groups: Iterable[Any], device: torch.device) -> None:
    """Abort the collectives of all these groups, so that threads that wait in them go on. Each abort has a thread:
    NCCL's may wait for a communicator of which another thread has a collective in flight."""

    def abort(group: Any) -> None:
        with suppress(Exception):
            group._get_backend(device).abort()

    for group in groups:
        threading.Thread(target=abort, args=(group,), name="abort", daemon=True).start()


class _Watcher:
    """On a thread of its own: says that this rank lives, and looks whether the others do."""

    _store: Any

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._beat = 0
        self._signs: dict[int, tuple[str, float]] = {}
        self._moved = ("", 0.0)
        self._looked_at = time.monotonic()
        self.all_there = False

    def guard(self) -> None:
        """The store is rank 0's: while that stands still, so does a look at it."""
        crew = self._crew
        while not crew._ended and crew.rank:
            time.sleep(BEAT_S)
            if (silent_s := time.monotonic() - self._looked_at) > crew._deadline_s:
                self._leave(f"rank 0 shows no sign of life for {silent_s:.0f} s")

    def run(self, store: Any) -> None:
        crew, self._store = self._crew, store
        while not crew._ended:
            self._beat += 1
            now = time.monotonic()
            if now - self._looked_at > _FEW_BEATS_S:
                self._signs.clear()  # this process stood still itself: it knows nothing of the others
            self._looked_at = now
            try:
                self._store.set(f"alive/{crew.rank}", crew._sign(self._beat))
                if self._store.check(["failed"]):
                    self._heard(json.loads(self._store.get("failed")))
                    return
                if crew.rank == 0:
                    self._look_at_children()
                if crew.rank == 0 or self.all_there:  # before, `guard` looks at rank 0
                    self._look_at_signs()
            except dist.DistError as error:
                if crew._ended:
                    return
                self._leave(f"rank 0 is gone: {error}")
            if crew._broken:
                return
            time.sleep(BEAT_S)

    def _heard(self, told: Mapping[str, Any]) -> None:
        crew = self._crew
        why = told["text"] if told["class"] == "RankLost" else f"{told['class']}: {told['text']}"
        if crew.rank:
            self._leave(f"rank {told['rank']} on host {told['host']}: {why}")
        elif told["rank"]:
            crew.lost(told["rank"], why, told["host"])

    def _look_at_children(self) -> None:
        crew = self._crew
        if crew._children is None or not (ended := crew._children.ended()):
            return
        time.sleep(BEAT_S)  # what it said itself is more than how it ended
        if self._store.check(["failed"]):
            return
        rank, how = min(ended.items())
        crew.lost(rank, f"ended: {how}")

    def _look_at_signs(self) -> None:
        crew, now, all_there = self._crew, time.monotonic(), self.all_there
        others = range(1, crew.ranks) if crew.rank == 0 else (0,)
        for rank in others:
            if (told := self._sign_of(rank)) is None:
                continue
            sign, age = told
            if rank not in self._signs:  # this rank may have begun to look late
                self._signs[rank] = sign, now - max(0.0, min(age, crew._deadline_s - _FEW_BEATS_S))
            elif sign != self._signs[rank][0]:
                self._signs[rank] = sign, now
        silent_s = {rank: now - at for rank, (_, at) in self._signs.items()}
        if crew.rank:
            asked = crew._asked_to_end_at and now - crew._asked_to_end_at > _FEW_BEATS_S
            if silent_s[0] > (_FEW_BEATS_S if asked else crew._deadline_s):
                self._leave(f"rank 0 shows no sign of life for {silent_s[0]:.0f} s")
            return
        stranded = any(self._store.check([f"stranded/{rank}"]) for rank in others)
        limit = _FEW_BEATS_S if stranded else crew._deadline_s
        if silent := [rank for rank in others if silent_s.get(rank, 0.0) > limit]:
            crew.lost(silent[0], f"shows no sign of life for {silent_s[silent[0]]:.0f} s (it has died or stands still)")
            return
        if all_there:
            self._look_at_progress(now)

    def _sign_of(self, rank: int) -> tuple[str, float] | None:
        """Return what changes while a rank lives, and for how many seconds it has not, as far as that is known; None as
        long as nothing can be seen of it."""
        if self.all_there or self._store.check([f"alive/{rank}"]):
            return self._store.get(f"alive/{rank}").decode(), 0.0
        children = self._crew._children
        return children.sign(rank) if children is not None else None

    def _look_at_progress(self, now: float) -> None:
        """Within an order nothing moves. A rank that has come less far than rank 0 holds the others up."""
        crew, number = self._crew, self._crew._order
        progress: dict[int, tuple[int, int]] = {}
        for rank, (sign, _) in self._signs.items():
            _, _, done, ticks = (int(each) for each in sign.split())
            progress[rank] = done, ticks
        seen = f"{number} {crew._done} {crew._mine_done} {crew._ticks} {sorted(progress.items())}"
        if seen != self._moved[0]:
            self._moved = seen, now
        if now - self._moved[1] < crew._deadline_s:
            return
        behind = {rank: ticks for rank, (done, ticks) in progress.items() if done < number}
        if not behind:
            return
        rank = min(behind, key=lambda each: (behind[each], each))
        if crew._mine_done == number or behind[rank] < crew._ticks:
            crew.lost(rank, f"has made no progress in an order for {crew._deadline_s:g} s (parallel.deadline_s)")

    def _leave(self, why: str) -> None:
        """Another rank than 0 ends: nothing of it is needed any more."""
        crew = self._crew
        if crew.rank == 0:
            crew._broken = crew._broken or why
            return
        _log.error("rank %d ends: %s", crew.rank, why)
        logging.shutdown()
        os._exit(_EXIT_LOST)


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether it says no more than that another rank is gone."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text.lower() or "NCCL" in text)
