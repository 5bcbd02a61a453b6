"""A trainer's calls: leases of groups, slots, and what a checkpoint contains."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
from collections.abc import Sequence

from tandem.errors import Conflict, Fenced, NotKnown, StoreError
from tandem.io.request_key import RequestKey
from tandem.rollout.queue import tables as rows
from tandem.rollout.queue import validation as checks
from tandem.rollout.queue.registration import Seats
from tandem.rollout.queue.state import LeaseState, QueueEntry
from tandem.rollout.queue.types import Lease


class HandOut(Seats):
    async def take(
        self,
        epoch: int,
        count: int = 0,
        *,
        sequences: int = 0,
        version: int | None = None,
        wait_s: float = 0.0,
        once: RequestKey | None = None,
    ) -> Lease | None:
        """`count` groups, or groups that hold exactly `sequences` siblings; oldest started first. None when `wait_s`
        has passed without them. Starved after too many drops in a row. `version` is announced on the way."""
        self._wake()
        self._check_epoch(epoch)
        async with self._calls.turn(once) as earlier:
            if earlier is not None:
                return await self._same_lease(earlier)
            if version is not None:
                await self.announce_version(epoch, version)
            checks.check_take(self._trainer(), count, sequences)
            deadline = self._clock() + min(wait_s, self.limits.max_wait_s)
            while True:
                self._check_epoch(epoch)
                checks.check_starved(self._trainer(), self._state)
                if entries := self._ready(count, sequences, announced=version is not None):
                    lease = self._state.lend(entries, self._clock() + self._trainer().lease_s)
                    if (handed := await self._calls.whole(self._hand_out(lease, once), once=once)) is not None:
                        return handed
                    continue
                self._news.clear()
                if not await self._wait_for_news(deadline):
                    return None

    def _ready(self, count: int, sequences: int, *, announced: bool) -> list[QueueEntry]:
        """`announced`: the trainer said its version with this take, so what is newer was played by one that it lost."""
        state = self._state
        while True:
            entries, stale = state.ready_sequences(sequences) if sequences else state.ready(count)
            self._leave_out(stale, "stale")
            undone = [entry for entry in entries if announced and entry.newest > state.version]
            if not undone:
                return entries
            self._leave_out(undone, "undone")

    async def _wait_for_news(self, deadline: float) -> bool:
        left = deadline - self._clock()
        if left <= 0:
            return False
        self._waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()
        finally:
            self._waiting -= 1
        return True

    async def _hand_out(self, lease: LeaseState, once: RequestKey | None) -> Lease | None:
        def change(db: sqlite3.Connection) -> None:
            rows.lend(db, lease)
            rows.say(db, next_order=self._state.next_order)

        try:
            frames = await self._frames(lease.entries)
            if damaged := [e for e, frame in zip(lease.entries, frames, strict=True) if isinstance(frame, StoreError)]:
                self._return([lease.id])
                self._leave_out(damaged, "damaged")
                return None
            taken = self._taken(lease.entries, frames)
            await self._calls.write(change, once, lease.id)
        except BaseException:
            self._return([lease.id])
            self._go_on()
            raise
        if lease.id not in self._state.leases:
            raise Fenced("another registration took the trainer's place while the groups were handed out")
        for group in taken:
            self.watch.took(group)
        return Lease(lease.id, lease.version, lease.expires - self._clock(), tuple(taken))

    async def _same_lease(self, id: int) -> Lease:
        if id not in self._state.leases:
            why = f"lease {id} was given for this key, and it ended since: use a new key for a new batch"
            raise Conflict(why, field="idempotency-key")
        lease = self._state.leases[id]
        taken = self._taken(lease.entries, await self._frames(lease.entries))
        return Lease(lease.id, lease.version, lease.expires - self._clock(), tuple(taken))

    async def renew(self, epoch: int, lease: int) -> float:
        """Seconds that it holds from now. NotKnown if it lapsed: its groups are in the queue again."""
        self._check_epoch(epoch)
        if lease not in self._state.leases:
            raise NotKnown(
                f"lease {lease} is not held; it was acknowledged, or it lapsed and its groups returned", field="id"
            )
        seconds = self._trainer().lease_s
        self._state.leases[lease].expires = self._clock() + seconds
        return seconds

    async def release(
        self, epoch: int, count: int, *, version: int | None = None, once: RequestKey | None = None
    ) -> None:
        """The slots of the `count` groups taken first: the engine holds the version that they made."""
        self._check_epoch(epoch)
        await self._calls.whole(self._release(epoch, count, version, once))

    async def _release(self, epoch: int, count: int, version: int | None, once: RequestKey | None) -> None:
        async with self._calls.turn(once) as earlier:
            if earlier is not None:
                return
            if version is not None:
                await self._announce(epoch, version)
            holding = self._state.holding
            if not 0 <= count <= len(holding):
                raise Conflict(f"release of {count}, but only {len(holding)} taken groups hold slots", field="count")
            freed = [holding.popleft() for _ in range(count)]
            acked = sum(entry is None or entry.id not in self._state.entries for entry in holding)

            def change(db: sqlite3.Connection) -> None:
                rows.stop_holding(db, [entry.id for entry in freed if entry is not None])
                rows.say(db, holding_acked=acked)

            try:
                await self._calls.write(change, once, [])
            except BaseException:
                holding.extendleft(reversed(freed))
                raise
            self._go_on()

    async def ack(
        self, epoch: int, leases: Sequence[int] = (), *, groups: Sequence[int] = (), once: RequestKey | None = None
    ) -> int:
        """They are in a checkpoint: forgotten for good. How many were still held. Again is no error. NotKnown, and
        nothing is acknowledged, if a lease lapsed: its groups are in the queue again."""
        self._check_epoch(epoch)
        return await self._calls.whole(self._ack(leases, groups, once))

    async def _ack(self, leases: Sequence[int], groups: Sequence[int], once: RequestKey | None) -> int:
        async with self._calls.turn(once) as earlier:
            if earlier is not None:
                return earlier
            state = self._state
            if lapsed := [lease for lease in leases if lease not in state.leases and lease not in state.acked]:
                raise NotKnown(
                    f"leases {lapsed[:8]} are not held and were not acknowledged: they lapsed, or another registration "
                    "returned them, and their groups are handed out again; nothing was acknowledged",
                    field="leases",
                )
            named = [entry for lease in leases if lease in state.leases for entry in state.leases[lease].entries]
            entries = {entry.id: entry for entry in named}
            entries |= {id: state.entries[id] for id in groups if id in state.entries and state.entries[id].place}
            emptied = [
                lease.id
                for lease in state.leases.values()
                if lease.id in leases or all(entry.id in entries for entry in lease.entries)
            ]
            still = sum(
                entry is None or entry.id in entries or entry.id not in state.entries for entry in state.holding
            )

            def change(db: sqlite3.Connection) -> None:
                rows.remove(db, entries)
                rows.note_acked(db, emptied)
                rows.say(db, holding_acked=still)

            held = {id: state.leases[id].expires for id in leases if id in state.leases}
            for id in held:
                state.leases[id].expires = math.inf  # it must not lapse while this is written
            try:
                await self._calls.write(change, once, len(entries))
            except BaseException:
                for id, expires in held.items():
                    state.leases[id].expires = expires
                raise
            for lease in emptied:
                state.leases.pop(lease, None)
            state.acked.update(emptied)
            for lease in state.leases.values():
                lease.entries = [entry for entry in lease.entries if entry.id not in entries]
            for entry in entries.values():
                state.free(entry)
            self._forget(entries.values())
            self.watch.count("acked", len(entries))
            self._go_on()
            return len(entries)
