"""The rollout queue's shared core: its state in memory, its disk, its clock, and steps that several calls use."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path

from tandem.errors import Conflict, Fenced, NotKnown, StoreError
from tandem.io.append_only_segments import SegmentPlace, Segments
from tandem.io.sqlite_store import Durable
from tandem.rollout.queue import tables
from tandem.rollout.queue.idempotency import IdempotentCalls
from tandem.rollout.queue.state import EnvironmentState, QueueEntry, WaitingEnvironment
from tandem.rollout.queue.stats import QueueStats
from tandem.rollout.queue.types import QueueLimits, Taken, TrainerSpec

_log = logging.getLogger(__name__)

_TICK_S = 0.5


class QueueCore:
    """One per queue. The calls of environments, of the trainer and of registration each hold a reference to it."""

    def __init__(
        self, directory: Path, limits: QueueLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Lock the directory and read back the state in it. StoreOwned if another process has locked it."""
        self.limits, self.directory, self.clock = limits or QueueLimits(), directory, clock
        self.segments = Segments(directory / "segments", reserve_bytes=self.limits.reserve_bytes)
        self.db = Durable(directory, tables.SCHEMA, files=self.segments)
        self.state = tables.read_state(self.db, clock())
        self.segments.keep_only(tables.places(self.state))
        self.stats = QueueStats(clock)
        self.changed = asyncio.Event()
        self.run_number = 0
        """Counts how often everything was cleared for another run."""
        self.waiting_takes = 0
        """Number of `take` calls that wait for groups."""
        self.calls = IdempotentCalls(self.db, self.limits.answers_kept_s)
        self._ticking: asyncio.Task[None] | None = None
        self._swept = 0.0

    @property
    def broken(self) -> str:
        """Why the disk takes no more writes; empty while it does."""
        return self.db.broken

    # --- time

    async def tick(self) -> None:
        """Expire leases, silent environments and overdue tickets. It runs twice a second after the first call."""
        state, now = self.state, self.clock()
        if lapsed := [lease.id for lease in state.leases.values() if lease.expires <= now]:
            self.return_leases(lapsed)
            self.calls.write_later(lambda db: tables.return_leases(db, lapsed))
            _log.warning("leases %s expired without renewal; their groups return to the queue", lapsed)
        silent = [e for e in state.environments.values() if e.live and now - e.seen > e.spec.lapse_s and not e.waiters]
        for each in silent:
            each.silent = True
        if silent:
            self.drop_tickets({each.id for each in silent}, "lapsed")
        late = now - self.limits.max_play_s
        overdue = [entry for entry in state.playing.values() if entry.since < late and not entry.writing]
        self.drop_later(overdue, "overdue")
        if lapsed or overdue:
            self.notify()
        if now - self._swept > 5:
            self._swept = now
            self._forget_environments()
            self.calls.write_later(tables.forget_answers)

    def _forget_environments(self) -> None:
        """Forget disconnected environments without groups. A restarted worker registers as a new environment each time,
        so the list would grow for ever."""
        state = self.state
        left = {each.id for each in state.environments.values() if not (each.connected or each.writes or each.waiters)}
        if left and (left := left - {entry.environment for entry in state.entries.values()}):
            for id in left:
                del state.environments[id]
                del self.stats.taken_by[id]
            self.calls.write_later(lambda db: tables.forget_environments(db, left))

    def start_ticking(self) -> None:
        """Start the ticking task at the first call: only then is an event loop running."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick_for_ever(), name="rollout-queue")
            self.notify()

    async def _tick_for_ever(self) -> None:
        while not self.broken:
            await asyncio.sleep(_TICK_S)
            await self.tick()

    def notify(self) -> None:
        """Admit groups to free slots and wake the waiting `take` calls: call it after every change."""
        self.drop_later(self.state.admit_waiting(), "stale")
        self.changed.set()

    async def read_frames(self, entries: Sequence[QueueEntry]) -> list[bytes | StoreError]:
        def one(place: SegmentPlace | None) -> bytes | StoreError:
            assert place is not None
            try:
                return self.segments.read(place)
            except (OSError, StoreError) as error:
                _log.error("%s", error)
                return StoreError(str(error))

        return await asyncio.to_thread(lambda: [one(entry.place) for entry in entries])

    def to_taken(self, entries: Sequence[QueueEntry], frames: Sequence[bytes | StoreError]) -> list[Taken]:
        taken: list[Taken] = []
        for e, frame in zip(entries, frames, strict=True):
            if isinstance(frame, StoreError):
                raise frame
            taken.append(Taken(e.id, e.order, e.environment, e.size, e.tokens, self.state.lag(e), frame))
        return taken

    def return_leases(self, leases: Iterable[int]) -> None:
        """Put the groups of these leases back into the queue, in memory."""
        found = [self.state.leases.pop(id) for id in leases if id in self.state.leases]
        back = [entry for lease in found for entry in lease.entries]
        self.state.requeue(back)

    def drop_tickets(self, environments: Set[int], reason: str) -> None:
        """Drop the tickets of environments that left or fell silent, and give their share to the others. One call for
        all of them, because computing shares reads every environment."""
        playing = self.state.playing.values()
        self.drop_later([e for e in playing if e.environment in environments and not e.writing], reason)
        self.state.update_shares()
        self.notify()

    def drop_later(self, entries: Sequence[QueueEntry], reason: str) -> None:
        """Drop entries now in memory and later on disk. No caller waits for it."""
        if entries:
            self.drop_in_memory(entries, reason)
            self.calls.write_later(self.drop_on_disk(entries, reason), then=lambda: self.delete_payloads(entries))

    def drop_on_disk(self, entries: Sequence[QueueEntry], reason: str) -> Callable[[sqlite3.Connection], None]:
        counted = Counter((entry.environment, reason) for entry in entries)
        ids = [entry.id for entry in entries]

        def change(db: sqlite3.Connection) -> None:
            tables.remove(db, ids)
            tables.count(db, counted)

        return change

    def drop_in_memory(self, entries: Sequence[QueueEntry], reason: str) -> None:
        for entry in entries:
            self.state.remove(entry)
            if entry.environment in self.state.environments:
                self.state.environments[entry.environment].counts[reason] += 1
        self.stats.count("dropped", len(entries), reason=reason)

    def delete_payloads(self, entries: Iterable[QueueEntry]) -> None:
        """Delete the bytes of groups that the index on disk no longer lists."""
        self.segments.forget([entry.place for entry in entries if entry.place is not None])

    def revoke_tickets(self, waiter: WaitingEnvironment) -> None:
        """Take back tickets that their environment never received."""
        for entry in waiter.granted:
            self.state.remove(entry)
        waiter.granted.clear()
        self.notify()

    async def forget_run(self) -> None:
        """Forget groups, leases and environments, in memory and on disk: another run begins."""
        state, places = self.state, tables.places(self.state)
        self.run_number += 1
        for each in state.environments.values():
            each.backlog.clear()
            while each.waiters:
                if not (answer := each.waiters.popleft().answer).done():
                    answer.set_result(None)
        for held in (state.entries, state.in_flight, state.playing, state.leases, state.acked, state.environments):
            held.clear()
        state.in_backlogs, state.unreleased = 0, deque()
        state.first_environment = first = state.next_environment
        self.stats.taken_by.clear()
        # The disk runs writes in order: earlier writes are done before the wipe, and no new one comes in between.
        await self.calls.write(lambda db: tables.wipe(db, first))
        self.segments.forget(places)

    def environment(self, environment: int) -> EnvironmentState:
        each = self.state.environments.get(environment)
        if each is None or not each.connected:
            raise NotKnown(f"environment {environment} is not registered here; register it again", field="environment")
        return each

    def is_connected(self, environment: int) -> bool:
        return environment in self.state.environments and self.state.environments[environment].connected

    def trainer_spec(self) -> TrainerSpec:
        if self.state.trainer is None:
            raise Conflict("no trainer has registered yet; try again once one has")
        return self.state.trainer

    def check_epoch(self, epoch: int) -> None:
        if epoch != self.state.epoch or self.state.trainer is None:
            raise Fenced(
                f"epoch {epoch} is outdated: the last registration has epoch {self.state.epoch}; only its calls count",
                field="epoch",
            )

    async def close(self) -> None:
        """Finish the running calls, then close the disk."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self.calls.finish()
        await asyncio.to_thread(self.db.close)
        self.segments.close()
