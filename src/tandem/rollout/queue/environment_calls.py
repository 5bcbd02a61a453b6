"""An environment's calls: tickets, groups, and what it gives up."""

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
from tandem.rollout.queue import tables as rows
from tandem.rollout.queue import validation as checks
from tandem.rollout.queue.core import Core
from tandem.rollout.queue.state import QueueEntry, WaitingEnvironment
from tandem.rollout.queue.types import Stored
from tandem.rollout.wire.codec import WireGroup
from tandem.types import NO_VERSION, Ticket


def _dated(group: WireGroup, version: int) -> WireGroup:
    """Tokens of unknown versions count as the trainer's when they came: they are that old at least."""
    oldest = version if group.oldest == NO_VERSION else min(group.oldest, version)
    return dataclasses.replace(group, oldest=oldest, newest=max(group.newest, version))


class Intake(Core):
    async def admit(
        self, environment: int, count: int = 1, *, wait_s: float = 0.0, once: RequestKey | None = None
    ) -> list[Ticket]:
        """Up to `count` tickets, one at least; none when `wait_s` has passed without a slot."""
        self._wake()
        async with self._calls.turn(once) as earlier:
            self.seen(environment)
            if earlier is not None:
                return [Ticket(order) for order in earlier]
            self._trainer()
            asking = WaitingEnvironment(max(1, count), asyncio.get_running_loop().create_future())
            each = self._environment(environment)
            each.asking.append(asking)
            self._go_on()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(wait_s, self.limits.max_wait_s)):
                        await asyncio.shield(asking.answer)
            except asyncio.CancelledError:
                self._ungrant(asking)
                raise
            finally:
                asking.answer.cancel()
                self.seen(environment)
            return await self._calls.whole(self._hand_tickets(asking, once), once=once)

    async def _hand_tickets(self, asking: WaitingEnvironment, once: RequestKey | None) -> list[Ticket]:
        granted = asking.granted
        if not all(entry.id in self._state.entries for entry in granted):  # another run began
            granted.clear()
        if not granted:
            return []
        for entry in granted:
            entry.since = self._clock()
        orders = [entry.order for entry in granted]

        def change(db: sqlite3.Connection) -> None:
            rows.add_tickets(db, granted)
            rows.say(db, next_order=max(orders) + 1)

        try:
            await self._calls.write(change, once, orders)
        except BaseException:
            self._ungrant(asking)
            raise
        for entry in granted:
            entry.busy = False
        if asking.backs != self._state.backs:
            self._leave_out(granted, "undone")
            return []
        if not self._environment_lives(granted[0].environment):
            self._leave_out(granted, "disconnected")
            return []
        return [Ticket(order) for order in orders]

    async def put(
        self, groups: Sequence[WireGroup], *, environment: int | None = None, once: RequestKey | None = None
    ) -> list[Stored]:
        """All of them or none. Each names its environment and, where it was played on one, its ticket;
        `environment` stands for those whose head names none. A group without a ticket waits in its environment's line
        for a slot. GroupRefused, QueueFull, StoreFull, Conflict (the ticket lapsed)."""
        self._wake()
        return await self._calls.whole(self._put(groups, environment, once))

    async def _put(self, groups: Sequence[WireGroup], environment: int | None, once: RequestKey | None) -> list[Stored]:
        async with self._calls.turn(once) as earlier:
            if earlier is not None:
                return [Stored(*each) for each in earlier]
            trainer, state = self._trainer(), self._state
            for named in {group.head.environment or environment for group in groups}:
                if named is not None and self._environment_lives(named):
                    self.seen(named)  # whatever becomes of what it sends
            makers = checks.check_groups(groups, environment, trainer, state)
            groups = [_dated(group, state.version) if group.unknown else group for group in groups]
            free = sum(group.head.ticket is None for group in groups)
            waiting = state.queued + state.coming
            if free and waiting + free > self.limits.max_queued:
                raise QueueFull(f"{waiting} groups wait, and {self.limits.max_queued} is the most; send it later")
            state.coming += free
            for maker in makers:
                state.environments[maker].writing += 1
            known = [state.environments[maker] for maker in makers]
            try:
                return await self._store(groups, makers, once)
            finally:
                state.coming -= free
                for each in known:
                    each.writing -= 1

    async def _store(self, groups: Sequence[WireGroup], makers: Sequence[int], once: RequestKey | None) -> list[Stored]:
        state, now = self._state, self._clock()
        entries: list[QueueEntry] = []
        stored: list[Stored] = []
        counted: Counter[tuple[int, str]] = Counter()
        for group, maker in zip(groups, makers, strict=True):
            ticket = group.head.ticket
            outcome = self._outcome(group)
            if ticket is None:
                entry = QueueEntry(state.next_id, maker, since=now)
                state.next_id += 1
            else:
                entry = state.playing[ticket]
                entry.busy = True
            entries.append(entry)
            stored.append(Stored(entry.id, outcome))
            counted[maker, "put" if outcome == "queued" else outcome] += 1
        kept = [k for k, each in enumerate(stored) if each.outcome == "queued"]
        run, backs = self._run, state.backs
        try:
            places = await self._calls.write(
                lambda db: self._write_groups(db, [groups[k] for k in kept], [entries[k] for k in kept], counted),
                once, [[each.id, each.outcome] for each in stored],
            )  # fmt: skip
        finally:
            for entry in entries:
                entry.busy = False
        if run != self._run:
            raise Conflict("another run began while the groups were written; they went with the one before")
        for (maker, what), number in counted.items():
            if maker in state.environments:
                state.environments[maker].counts[what] += number
            self.watch.count("put" if what == "put" else "dropped", number, reason=what)
        for k, place in zip(kept, places, strict=True):
            self._queue(entries[k], groups[k], place)
        if backs != state.backs:  # a trainer went back meanwhile, and what it never made was not here to be found
            late = {entries[k].id for k in kept if entries[k].newest > state.version}
            state.leave_lines(lambda entry: entry.id in late)
            self._leave_out([entries[k] for k in kept if entries[k].id in late], "undone")
        self._go_on()
        return stored

    def _outcome(self, group: WireGroup) -> str:
        """Of one with a ticket it is seen when its turn comes: until then it holds a slot anyway."""
        if group.head.ticket is not None:
            return "queued"
        if self._state.is_stale(group.oldest):
            return "stale"
        return "undone" if self._state.is_ahead(group.newest) else "queued"

    def _write_groups(
        self,
        db: sqlite3.Connection,
        groups: list[WireGroup],
        entries: list[QueueEntry],
        counted: Counter[tuple[int, str]],
    ) -> list[SegmentPlace]:
        places = [self._segments.append(memoryview(group.frame)) for group in groups]
        free = list[QueueEntry]()
        free_places = list[SegmentPlace]()
        for entry, group, place in zip(entries, groups, places, strict=True):
            filled = dataclasses.replace(
                entry, size=group.size, tokens=group.tokens, oldest=group.oldest, newest=group.newest
            )
            if entry.order >= 0:
                rows.fill_ticket(db, filled, place)
            else:
                free.append(filled)
                free_places.append(place)
        rows.add_groups(db, free, free_places)
        rows.count(db, counted)
        return places

    def _queue(self, entry: QueueEntry, group: WireGroup, place: SegmentPlace) -> None:
        state = self._state
        entry.place, entry.size, entry.tokens = place, group.size, group.tokens
        entry.oldest, entry.newest = group.oldest, group.newest
        state.entries[entry.id] = entry
        state.dropped_in_a_row = 0
        if entry.order >= 0:
            state.playing.pop(entry.order, None)
        else:
            state.environments[entry.environment].line.append(entry)
            state.in_lines += 1

    async def drop(self, environment: int, ticket: int, reason: str, *, once: RequestKey | None = None) -> None:
        """Nothing to learn; the slot is free at once."""
        await self._calls.whole(self._drop_ticket(environment, ticket, checks.check_reason(reason), once))

    async def _drop_ticket(self, environment: int, ticket: int, reason: str, once: RequestKey | None) -> None:
        async with self._calls.turn(once) as earlier:
            self.seen(environment)
            if earlier is not None:
                return
            entry = checks.check_ticket(self._state, environment, ticket)
            entry.busy = True
            try:
                await self._calls.write(self._dropping([entry], reason), once, [])
            except BaseException:
                entry.busy = False
                raise
            self._dropped([entry], reason)
            self._state.dropped_in_a_row += 1
            self._go_on()

    async def quarantine(self, environment: int | None, field: str, reason: str, body: bytes | memoryview) -> None:
        """Keeps the beginning of what was refused, with the reason, for whoever looks into it."""
        kept, most = bytes(body[: self.limits.quarantine_bytes]), self.limits.quarantine_rows
        self.watch.count("dropped", 1, reason="refused")
        if environment in self._state.environments:
            self._state.environments[environment].counts["refused"] += 1
        with contextlib.suppress(StoreError):  # a full disk has worse news than this for its caller
            await self._calls.write(lambda db: rows.add_quarantine(db, environment, field, reason, kept, most))
