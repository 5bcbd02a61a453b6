"""The trainer's calls to the rollout queue: take and renew leases, release slots, acknowledge, announce versions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
from collections.abc import Sequence

from tandem.errors import Conflict, Fenced, NotKnown, StoreError
from tandem.io.request_key import RequestKey
from tandem.rollout.queue import tables, validation
from tandem.rollout.queue.core import QueueCore
from tandem.rollout.queue.state import LeaseState, QueueEntry
from tandem.rollout.queue.types import Lease


class TrainerCalls:
    def __init__(self, core: QueueCore) -> None:
        self._core = core

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
        """Lease `count` groups, or groups of exactly `sequences` siblings in all, oldest started first. None if not
        ready within `wait_s`. Starved after too many drops in a row. `version` is announced first."""
        self._core.start_ticking()
        self._core.check_epoch(epoch)
        async with self._core.calls.one_at_a_time(once) as earlier:
            if earlier is not None:
                return await self._same_lease(earlier)
            if version is not None:
                await self.announce_version(epoch, version)
            validation.check_take(self._core.trainer_spec(), count, sequences)
            deadline = self._core.clock() + min(wait_s, self._core.limits.max_wait_s)
            while True:
                self._core.check_epoch(epoch)
                validation.check_starved(self._core.trainer_spec(), self._core.state)
                if entries := self._ready(count, sequences, announced=version is not None):
                    expires = self._core.clock() + self._core.trainer_spec().lease_s
                    hand_out = self._hand_out(self._core.state.lease_out(entries, expires), once)
                    if (lease := await self._core.calls.run_to_end(hand_out, once=once)) is not None:
                        return lease
                    continue
                self._core.changed.clear()
                if not await self._wait_for_change(deadline):
                    return None

    def _ready(self, count: int, sequences: int, *, announced: bool) -> list[QueueEntry]:
        """Return the entries of the next batch, or none. `announced`: the trainer sent its version with this take, so
        newer groups were played by a version that it lost, and are dropped."""
        state = self._core.state
        while True:
            entries, stale = state.ready_sequences(sequences) if sequences else state.ready(count)
            self._core.drop_later(stale, "stale")
            undone = [entry for entry in entries if announced and entry.newest > state.version]
            if not undone:
                return entries
            self._core.drop_later(undone, "undone")

    async def _wait_for_change(self, deadline: float) -> bool:
        left = deadline - self._core.clock()
        if left <= 0:
            return False
        self._core.waiting_takes += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._core.changed.wait()
        finally:
            self._core.waiting_takes -= 1
        return True

    async def _hand_out(self, lease: LeaseState, once: RequestKey | None) -> Lease | None:
        def change(db: sqlite3.Connection) -> None:
            tables.add_lease(db, lease)
            tables.set_facts(db, next_order=self._core.state.next_order)

        try:
            frames = await self._core.read_frames(lease.entries)
            if damaged := [e for e, frame in zip(lease.entries, frames, strict=True) if isinstance(frame, StoreError)]:
                self._core.return_leases([lease.id])
                self._core.drop_later(damaged, "damaged")
                return None
            taken = self._core.to_taken(lease.entries, frames)
            await self._core.calls.write(change, once, lease.id)
        except BaseException:
            self._core.return_leases([lease.id])
            self._core.notify()
            raise
        if lease.id not in self._core.state.leases:
            raise Fenced("another trainer registered while these groups were handed out")
        for group in taken:
            self._core.stats.took(group)
        return Lease(lease.id, lease.version, lease.expires - self._core.clock(), tuple(taken))

    async def _same_lease(self, id: int) -> Lease:
        if id not in self._core.state.leases:
            why = f"this key returned lease {id}, which has ended; use a new key for a new batch"
            raise Conflict(why, field="idempotency-key")
        lease = self._core.state.leases[id]
        taken = self._core.to_taken(lease.entries, await self._core.read_frames(lease.entries))
        return Lease(lease.id, lease.version, lease.expires - self._core.clock(), tuple(taken))

    async def announce_version(self, epoch: int, version: int, *, once: RequestKey | None = None) -> None:
        """Note that the trainer holds `version` now. Groups that became too old are never handed out."""
        await self._core.calls.run_to_end(self._announce(epoch, version, once))

    async def _announce(self, epoch: int, version: int, once: RequestKey | None = None) -> None:
        self._core.check_epoch(epoch)
        async with self._core.calls.one_at_a_time(once) as earlier:
            if earlier is not None:
                return
            was = self._core.state.version
            if version < was:
                raise Conflict(f"version {version}: this registration announced version {was} before", field="version")
            if version == was:
                if once is not None:  # record the key although nothing changes
                    await self._core.calls.write(lambda _: None, once, [])
                return
            await self._core.calls.write(lambda db: tables.set_facts(db, version=version), once, [])
            self._core.state.version = max(version, self._core.state.version)
            self._core.drop_later(self._stale_in_backlogs(), "stale")
            self._core.notify()

    def _stale_in_backlogs(self) -> list[QueueEntry]:
        """Remove groups too old to be admitted, so that they do not count towards `max_queued`."""
        return self._core.state.remove_from_backlogs(lambda entry: self._core.state.is_stale(entry.oldest))

    async def renew(self, epoch: int, lease: int) -> float:
        """Extend a lease; return its seconds from now. NotKnown if it lapsed: its groups are in the queue again."""
        self._core.check_epoch(epoch)
        if lease not in self._core.state.leases:
            raise NotKnown(
                f"lease {lease} is not held: it was acknowledged, or it lapsed and its groups are in the queue again",
                field="id",
            )
        seconds = self._core.trainer_spec().lease_s
        self._core.state.leases[lease].expires = self._core.clock() + seconds
        return seconds

    async def release(
        self, epoch: int, count: int, *, version: int | None = None, once: RequestKey | None = None
    ) -> None:
        """Free the slots of the `count` groups taken first. Call it once the engine holds the version they trained."""
        self._core.check_epoch(epoch)
        await self._core.calls.run_to_end(self._release(epoch, count, version, once))

    async def _release(self, epoch: int, count: int, version: int | None, once: RequestKey | None) -> None:
        async with self._core.calls.one_at_a_time(once) as earlier:
            if earlier is not None:
                return
            if version is not None:
                await self._announce(epoch, version)
            unreleased = self._core.state.unreleased
            if not 0 <= count <= len(unreleased):
                raise Conflict(f"release of {count}: only {len(unreleased)} taken groups hold slots", field="count")
            freed = [unreleased.popleft() for _ in range(count)]
            acked = sum(entry is None or entry.id not in self._core.state.entries for entry in unreleased)

            def change(db: sqlite3.Connection) -> None:
                tables.release_slots(db, [entry.id for entry in freed if entry is not None])
                tables.set_facts(db, holding_acked=acked)

            try:
                await self._core.calls.write(change, once, [])
            except BaseException:
                unreleased.extendleft(reversed(freed))
                raise
            self._core.notify()

    async def ack(
        self, epoch: int, leases: Sequence[int] = (), *, groups: Sequence[int] = (), once: RequestKey | None = None
    ) -> int:
        """Forget groups that a checkpoint contains; return how many were still held. Acknowledging twice is no error.
        NotKnown, and nothing is acknowledged, if a lease lapsed: its groups are in the queue again."""
        self._core.check_epoch(epoch)
        return await self._core.calls.run_to_end(self._ack(leases, groups, once))

    async def _ack(self, leases: Sequence[int], groups: Sequence[int], once: RequestKey | None) -> int:
        async with self._core.calls.one_at_a_time(once) as earlier:
            if earlier is not None:
                return earlier
            state = self._core.state
            if lapsed := [lease for lease in leases if lease not in state.leases and lease not in state.acked]:
                raise NotKnown(
                    f"leases {lapsed[:8]} are not held and were not acknowledged: they lapsed, or another registration "
                    "returned them, and their groups are in the queue again; nothing was acknowledged",
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
                entry is None or entry.id in entries or entry.id not in state.entries for entry in state.unreleased
            )

            def change(db: sqlite3.Connection) -> None:
                tables.remove(db, entries)
                tables.mark_acked(db, emptied)
                tables.set_facts(db, holding_acked=still)

            held = {id: state.leases[id].expires for id in leases if id in state.leases}
            for id in held:
                state.leases[id].expires = math.inf  # it must not lapse while this is written
            try:
                await self._core.calls.write(change, once, len(entries))
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
                state.remove(entry)
            self._core.delete_payloads(entries.values())
            self._core.stats.count("acked", len(entries))
            self._core.notify()
            return len(entries)
