"""An environment's calls to the rollout queue: get tickets, put groups, drop tickets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
from collections import Counter
from collections.abc import Sequence

from tandem.errors import Conflict, QueueFull, StoreError
from tandem.io.append_only_segments import SegmentPlace
from tandem.io.request_key import RequestKey
from tandem.rollout.queue import tables, validation
from tandem.rollout.queue.core import QueueCore
from tandem.rollout.queue.state import QueueEntry, WaitingEnvironment
from tandem.rollout.queue.types import Stored
from tandem.rollout.wire.codec import WireGroup
from tandem.types import NO_VERSION, Ticket


def _with_arrival_version(group: WireGroup, version: int) -> WireGroup:
    """Give tokens of unknown version the trainer's version at their arrival: they are at least that old."""
    oldest = version if group.oldest == NO_VERSION else min(group.oldest, version)
    return dataclasses.replace(group, oldest=oldest, newest=max(group.newest, version))


class EnvironmentCalls:
    def __init__(self, core: QueueCore) -> None:
        self._core = core

    def heartbeat(self, environment: int) -> None:
        """Note that the environment is alive; its other calls do the same. NotKnown if it is not registered."""
        each = self._core.environment(environment)
        each.seen = self._core.clock()
        if each.silent:
            each.silent = False
            self._core.state.update_shares()
            self._core.notify()

    async def admit(
        self, environment: int, count: int = 1, *, wait_s: float = 0.0, once: RequestKey | None = None
    ) -> list[Ticket]:
        """Return 1 to `count` tickets, or none if no slot became free within `wait_s`."""
        self._core.start_ticking()
        async with self._core.calls.one_at_a_time(once) as earlier:
            self.heartbeat(environment)
            if earlier is not None:
                return [Ticket(order) for order in earlier]
            self._core.trainer_spec()
            waiter = WaitingEnvironment(max(1, count), asyncio.get_running_loop().create_future())
            each = self._core.environment(environment)
            each.waiters.append(waiter)
            self._core.notify()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(wait_s, self._core.limits.max_wait_s)):
                        await asyncio.shield(waiter.answer)
            except asyncio.CancelledError:
                self._core.revoke_tickets(waiter)
                raise
            finally:
                waiter.answer.cancel()
                self.heartbeat(environment)
            return await self._core.calls.run_to_end(self._issue_tickets(waiter, once), once=once)

    async def _issue_tickets(self, waiter: WaitingEnvironment, once: RequestKey | None) -> list[Ticket]:
        granted = waiter.granted
        if not all(entry.id in self._core.state.entries for entry in granted):  # they belonged to a run that ended
            granted.clear()
        if not granted:
            return []
        for entry in granted:
            entry.since = self._core.clock()
        orders = [entry.order for entry in granted]

        def change(db: sqlite3.Connection) -> None:
            tables.add_tickets(db, granted)
            tables.set_facts(db, next_order=max(orders) + 1)

        try:
            await self._core.calls.write(change, once, orders)
        except BaseException:
            self._core.revoke_tickets(waiter)
            raise
        for entry in granted:
            entry.writing = False
        if waiter.rollbacks != self._core.state.rollbacks:
            self._core.drop_later(granted, "undone")
            return []
        if not self._core.is_connected(granted[0].environment):
            self._core.drop_later(granted, "disconnected")
            return []
        return [Ticket(order) for order in orders]

    async def put(
        self, groups: Sequence[WireGroup], *, environment: int | None = None, once: RequestKey | None = None
    ) -> list[Stored]:
        """Store all groups or none. Each names its environment and its ticket, if it has one; `environment` is the
        default for groups that name none. A group without a ticket waits in its environment's backlog for a slot.
        Raises GroupRefused, QueueFull, StoreFull, or Conflict if a ticket lapsed."""
        self._core.start_ticking()
        return await self._core.calls.run_to_end(self._put(groups, environment, once))

    async def _put(self, groups: Sequence[WireGroup], environment: int | None, once: RequestKey | None) -> list[Stored]:
        async with self._core.calls.one_at_a_time(once) as earlier:
            if earlier is not None:
                return [Stored(*each) for each in earlier]
            trainer, state = self._core.trainer_spec(), self._core.state
            for named in {group.head.environment or environment for group in groups}:
                if named is not None and self._core.is_connected(named):
                    self.heartbeat(named)  # also if its groups are refused below
            environments = validation.check_groups(groups, environment, trainer, state)
            groups = [_with_arrival_version(group, state.version) if group.unknown else group for group in groups]
            free = sum(group.head.ticket is None for group in groups)
            waiting = state.queued + state.being_written
            if free and waiting + free > self._core.limits.max_queued:
                most = self._core.limits.max_queued
                raise QueueFull(f"{waiting} groups are queued, and the limit is {most}; send it again later")
            state.being_written += free
            for made_by in environments:
                state.environments[made_by].writes += 1
            known = [state.environments[made_by] for made_by in environments]
            try:
                return await self._store(groups, environments, once)
            finally:
                state.being_written -= free
                for each in known:
                    each.writes -= 1

    async def _store(
        self, groups: Sequence[WireGroup], environments: Sequence[int], once: RequestKey | None
    ) -> list[Stored]:
        state, now = self._core.state, self._core.clock()
        entries: list[QueueEntry] = []
        stored: list[Stored] = []
        counted: Counter[tuple[int, str]] = Counter()
        for group, made_by in zip(groups, environments, strict=True):
            ticket = group.head.ticket
            outcome = self._outcome(group)
            if ticket is None:
                entry = QueueEntry(state.next_id, made_by, since=now)
                state.next_id += 1
            else:
                entry = state.playing[ticket]
                entry.writing = True
            entries.append(entry)
            stored.append(Stored(entry.id, outcome))
            counted[made_by, "put" if outcome == "queued" else outcome] += 1
        kept = [k for k, each in enumerate(stored) if each.outcome == "queued"]
        run, rollbacks = self._core.run_number, state.rollbacks
        try:
            places = await self._core.calls.write(
                lambda db: self._write_groups(db, [groups[k] for k in kept], [entries[k] for k in kept], counted),
                once, [[each.id, each.outcome] for each in stored],
            )  # fmt: skip
        finally:
            for entry in entries:
                entry.writing = False
        if run != self._core.run_number:
            raise Conflict("another run began while the groups were written; they were dropped with the earlier run")
        for (made_by, what), number in counted.items():
            if made_by in state.environments:
                state.environments[made_by].counts[what] += number
            self._core.stats.count("put" if what == "put" else "dropped", number, reason=what)
        for k, place in zip(kept, places, strict=True):
            self._queue(entries[k], groups[k], place)
        if (
            rollbacks != state.rollbacks
        ):  # the trainer went back during the write and could not find these groups in memory
            late = {entries[k].id for k in kept if entries[k].newest > state.version}
            state.remove_from_backlogs(lambda entry: entry.id in late)
            self._core.drop_later([entries[k] for k in kept if entries[k].id in late], "undone")
        self._core.notify()
        return stored

    def _outcome(self, group: WireGroup) -> str:
        """Return `queued`, or why the group is dropped now. One with a ticket has a slot and is checked at hand-out."""
        if group.head.ticket is not None:
            return "queued"
        if self._core.state.is_stale(group.oldest):
            return "stale"
        return "undone" if self._core.state.is_too_new(group.newest) else "queued"

    def _write_groups(
        self,
        db: sqlite3.Connection,
        groups: list[WireGroup],
        entries: list[QueueEntry],
        counted: Counter[tuple[int, str]],
    ) -> list[SegmentPlace]:
        places = [self._core.segments.append(memoryview(group.frame)) for group in groups]
        free = list[QueueEntry]()
        free_places = list[SegmentPlace]()
        for entry, group, place in zip(entries, groups, places, strict=True):
            filled = dataclasses.replace(
                entry, size=group.size, tokens=group.tokens, oldest=group.oldest, newest=group.newest
            )
            if entry.order >= 0:
                tables.fill_ticket(db, filled, place)
            else:
                free.append(filled)
                free_places.append(place)
        tables.add_groups(db, free, free_places)
        tables.count(db, counted)
        return places

    def _queue(self, entry: QueueEntry, group: WireGroup, place: SegmentPlace) -> None:
        state = self._core.state
        entry.place, entry.size, entry.tokens = place, group.size, group.tokens
        entry.oldest, entry.newest = group.oldest, group.newest
        state.entries[entry.id] = entry
        state.dropped_in_a_row = 0
        if entry.order >= 0:
            state.playing.pop(entry.order, None)
        else:
            state.environments[entry.environment].backlog.append(entry)
            state.in_backlogs += 1

    async def drop(self, environment: int, ticket: int, reason: str, *, once: RequestKey | None = None) -> None:
        """Give up a ticket whose episode has nothing to learn from; its slot is free at once."""
        await self._core.calls.run_to_end(self._drop_ticket(environment, ticket, validation.check_reason(reason), once))

    async def _drop_ticket(self, environment: int, ticket: int, reason: str, once: RequestKey | None) -> None:
        async with self._core.calls.one_at_a_time(once) as earlier:
            self.heartbeat(environment)
            if earlier is not None:
                return
            entry = validation.check_ticket(self._core.state, environment, ticket)
            entry.writing = True
            try:
                await self._core.calls.write(self._core.drop_on_disk([entry], reason), once, [])
            except BaseException:
                entry.writing = False
                raise
            self._core.drop_in_memory([entry], reason)
            self._core.state.dropped_in_a_row += 1
            self._core.notify()

    async def quarantine(self, environment: int | None, field: str, reason: str, body: bytes | memoryview) -> None:
        """Keep the beginning of a refused body and the reason, for debugging."""
        kept, most = bytes(body[: self._core.limits.quarantine_bytes]), self._core.limits.quarantine_rows
        self._core.stats.count("dropped", 1, reason="refused")
        if environment in self._core.state.environments:
            self._core.state.environments[environment].counts["refused"] += 1
        with contextlib.suppress(StoreError):  # on a full disk the caller still gets the refusal itself
            await self._core.calls.write(lambda db: tables.add_quarantine(db, environment, field, reason, kept, most))
