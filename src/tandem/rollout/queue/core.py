"""What all calls of the rollout queue share: its memory, its disk, and the steps that several of them take."""

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
from tandem.rollout.queue import tables as rows
from tandem.rollout.queue.idempotency import IdempotentCalls
from tandem.rollout.queue.state import EnvironmentState, QueueEntry, WaitingEnvironment
from tandem.rollout.queue.stats import QueueStats
from tandem.rollout.queue.types import QueueLimits, Taken, TrainerSpec

_log = logging.getLogger(__name__)

_TICK_S = 0.5


class Core:
    def __init__(
        self, directory: Path, limits: QueueLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Owns the directory, and finds in it what was left there; StoreOwned if another process does."""
        self.limits, self.directory, self._clock = limits or QueueLimits(), directory, clock
        self._segments = Segments(directory / "segments", reserve_bytes=self.limits.reserve_bytes)
        self._db = Durable(directory, rows.SCHEMA, files=self._segments)
        self._state = rows.read_state(self._db, clock())
        self._segments.keep_only(rows.places(self._state))
        self.watch = QueueStats(clock)
        self._news = asyncio.Event()
        self._run = 0
        """Goes up when everything is forgotten."""
        self._waiting = 0
        """Takes that wait for groups."""
        self._calls = IdempotentCalls(self._db, self.limits.answers_kept_s)
        self._ticking: asyncio.Task[None] | None = None
        self._swept = 0.0

    @property
    def broken(self) -> str:
        """Why nothing is stored any more; empty while all is well."""
        return self._db.broken

    def seen(self, environment: int) -> None:
        """It lives: every other call of an environment says so too. NotKnown if it is not registered."""
        each = self._environment(environment)
        each.seen = self._clock()
        if each.silent:
            each.silent = False
            self._state.share_out()
            self._go_on()

    # --- time

    async def tick(self) -> None:
        """What only time brings about. It runs by itself twice a second once anybody called."""
        state, now = self._state, self._clock()
        if lapsed := [lease.id for lease in state.leases.values() if lease.expires <= now]:
            self._return(lapsed)
            self._calls.later(lambda db: rows.take_back(db, lapsed))
            _log.warning("leases %s lapsed: their groups are handed out again", lapsed)
        fallen = [e for e in state.environments.values() if e.live and now - e.seen > e.spec.lapse_s and not e.asking]
        for each in fallen:
            each.silent = True
        if fallen:
            self._lapse({each.id for each in fallen}, "lapsed")
        late = now - self.limits.max_play_s
        overdue = [entry for entry in state.playing.values() if entry.since < late and not entry.busy]
        self._leave_out(overdue, "overdue")
        if lapsed or overdue:
            self._go_on()
        if now - self._swept > 5:
            self._swept = now
            self._forget_environments()
            self._calls.later(rows.forget_answers)

    def _forget_environments(self) -> None:
        """Those that left, and of whom nothing is left: a worker that is started again is another one each time."""
        state = self._state
        left = {each.id for each in state.environments.values() if not (each.connected or each.writing or each.asking)}
        if left and (left := left - {entry.environment for entry in state.entries.values()}):
            for id in left:
                del state.environments[id]
                del self.watch.taken_by[id]
            self._calls.later(lambda db: rows.forget_environments(db, left))

    def _wake(self) -> None:
        """The first call finds an event loop to tick on."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick_for_ever(), name="rollout-queue")
            self._go_on()

    async def _tick_for_ever(self) -> None:
        while not self.broken:
            await asyncio.sleep(_TICK_S)
            await self.tick()

    def _go_on(self) -> None:
        """Something changed: slots may be free, groups may be ready."""
        self._leave_out(self._state.let_in(), "stale")
        self._news.set()

    async def _frames(self, entries: Sequence[QueueEntry]) -> list[bytes | StoreError]:
        def one(place: SegmentPlace | None) -> bytes | StoreError:
            assert place is not None
            try:
                return self._segments.read(place)
            except (OSError, StoreError) as error:
                _log.error("%s", error)
                return StoreError(str(error))

        return await asyncio.to_thread(lambda: [one(entry.place) for entry in entries])

    def _taken(self, entries: Sequence[QueueEntry], frames: Sequence[bytes | StoreError]) -> list[Taken]:
        taken: list[Taken] = []
        for e, frame in zip(entries, frames, strict=True):
            if isinstance(frame, StoreError):
                raise frame
            taken.append(Taken(e.id, e.order, e.environment, e.size, e.tokens, self._state.lag(e), frame))
        return taken

    def _return(self, leases: Iterable[int]) -> None:
        found = [self._state.leases.pop(id) for id in leases if id in self._state.leases]
        back = [entry for lease in found for entry in lease.entries]
        self._state.come_back(back)

    def _lapse(self, environments: Set[int], reason: str) -> None:
        """Drop the tickets of environments that left or fell silent, and share their slots out: once for all of them,
        for each sharing looks at every environment."""
        playing = self._state.playing.values()
        self._leave_out([e for e in playing if e.environment in environments and not e.busy], reason)
        self._state.share_out()
        self._go_on()

    def _leave_out(self, entries: Sequence[QueueEntry], reason: str) -> None:
        """Drops that nobody asked for, and nobody waits for."""
        if entries:
            self._dropped(entries, reason)
            self._calls.later(self._dropping(entries, reason), then=lambda: self._forget(entries))

    def _dropping(self, entries: Sequence[QueueEntry], reason: str) -> Callable[[sqlite3.Connection], None]:
        counted = Counter((entry.environment, reason) for entry in entries)
        ids = [entry.id for entry in entries]

        def change(db: sqlite3.Connection) -> None:
            rows.remove(db, ids)
            rows.count(db, counted)

        return change

    def _dropped(self, entries: Sequence[QueueEntry], reason: str) -> None:
        for entry in entries:
            self._state.free(entry)
            if entry.environment in self._state.environments:
                self._state.environments[entry.environment].counts[reason] += 1
        self.watch.count("dropped", len(entries), reason=reason)

    def _forget(self, entries: Iterable[QueueEntry]) -> None:
        """Their bytes; the index says on the disk that they are not wanted."""
        self._segments.forget([entry.place for entry in entries if entry.place is not None])

    def _ungrant(self, asking: WaitingEnvironment) -> None:
        for entry in asking.granted:
            self._state.free(entry)
        asking.granted.clear()
        self._go_on()

    async def _begin_again(self) -> None:
        state, places = self._state, rows.places(self._state)
        self._run += 1
        for each in state.environments.values():
            each.line.clear()
            while each.asking:
                if not (answer := each.asking.popleft().answer).done():
                    answer.set_result(None)
        for held in (state.entries, state.flight, state.playing, state.leases, state.acked, state.environments):
            held.clear()
        state.in_lines, state.holding = 0, deque()
        state.first_environment = first = state.next_environment
        self.watch.taken_by.clear()
        # After what was submitted before, and nothing new comes in between.
        await self._calls.write(lambda db: rows.wipe(db, first))
        self._segments.forget(places)

    def _environment(self, environment: int) -> EnvironmentState:
        each = self._state.environments.get(environment)
        if each is None or not each.connected:
            raise NotKnown(f"environment {environment} is not registered here; register it again", field="environment")
        return each

    def _environment_lives(self, environment: int) -> bool:
        return environment in self._state.environments and self._state.environments[environment].connected

    def _trainer(self) -> TrainerSpec:
        if self._state.trainer is None:
            raise Conflict("no trainer has registered yet; try again when one has")
        return self._state.trainer

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._state.epoch or self._state.trainer is None:
            raise Fenced(
                f"epoch {epoch} is not the trainer's: the last registration has {self._state.epoch}, and whoever holds "
                "that one is the trainer now",
                field="epoch",
            )
