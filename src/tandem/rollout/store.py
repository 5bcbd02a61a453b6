"""The in-memory rollout store, for producer and trainer in one process.

consumes: finished groups               waits for: a slot (admit), the oldest start (take)
produces: groups, oldest started first

Why staleness is bounded: a group started while the engine holds version u holds a slot from then on, and so does every
group started before it and not yet released. Slots are released only once the engine holds the version that their
groups trained. There are (max_lag + 1) * groups_per_step slots, so the group is trained at version u + max_lag at the
latest.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.errors import Starved, StoreError, StoreTimeout
from tandem.types import Group, PlacedImage, Ticket, Trajectory


class MemoryStore:
    def __init__(self, slots: int, *, max_dropped: int = 256, take_timeout_s: float = 600.0) -> None:
        self.slots = slots
        self.dropped: Counter[str] = Counter()
        self._max_dropped, self._take_timeout_s = max_dropped, take_timeout_s
        self._started = self._held = self._dropped_in_a_row = 0
        self._in_flight: dict[int, Group | None] = {}
        """By order of start; None until it is put. A taken group is removed here but holds its slot until `release`."""
        self._replay: deque[int] = deque()
        """Orders in progress at the checkpoint that was restored: they hold their slots and are played again."""
        self._waiting: deque[asyncio.Future[Ticket]] = deque()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def taken(self) -> int:
        """Number of groups that are taken and not released."""
        return self._held - len(self._in_flight)

    async def admit(self) -> Ticket:
        if self._error is not None:
            raise self._error
        waiter: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._admit_waiting()
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.exception() is None:  # it got a ticket that the caller never sees
                del self._in_flight[waiter.result().order]
                self._free(1)
            raise

    async def put(self, ticket: Ticket, group: Group) -> None:
        if ticket.order not in self._in_flight or self._in_flight[ticket.order] is not None:
            raise StoreError(f"store: ticket {ticket.order} is not waiting for a group; it was put or dropped before")
        if not group:
            raise StoreError(f"store: ticket {ticket.order} was put with an empty group; drop it with a reason instead")
        self._in_flight[ticket.order] = group
        self._dropped_in_a_row = 0
        self._changed.set()

    async def drop(self, ticket: Ticket, reason: str) -> None:
        if self._in_flight.get(ticket.order, ...) is not None:
            raise StoreError(f"store: ticket {ticket.order} is not in flight; it was put or dropped before")
        del self._in_flight[ticket.order]
        self.dropped[reason] += 1
        self._dropped_in_a_row += 1
        self._free(1)
        if self._dropped_in_a_row >= self._max_dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
            self.fail(
                Starved(
                    f"store: {self._dropped_in_a_row} groups in a row had nothing to learn from (so far: {reasons}); "
                    "make tasks easier or harder, warm up longer, raise train.group_size, or raise train.max_dropped"
                )
            )
        self._changed.set()

    async def take(self, count: int) -> list[Group]:
        if count > self.slots:
            raise StoreError(f"store: take({count}) can never succeed: there are only {self.slots} slots")
        try:
            async with asyncio.timeout(self._take_timeout_s):
                while self._error is None and not self._ready(count):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise StoreTimeout(
                f"store: {count} groups did not finish within {self._take_timeout_s:g} s (train.group_timeout_s); "
                f"{len(self._in_flight)} are in progress"
            ) from None
        if self._error is not None:  # outside the try: some of our errors are TimeoutErrors
            raise self._error
        oldest = list(self._in_flight)[:count]  # a dict keeps insertion order, and tickets are made in order
        return [group for order in oldest if (group := self._in_flight.pop(order)) is not None]

    async def release(self, count: int) -> None:
        if count > self.taken:
            raise StoreError(f"store: release({count}), but only {self.taken} taken groups hold slots")
        self._free(count)

    async def ack(self, groups: Sequence[Group]) -> None:
        """Do nothing: this store keeps no taken groups."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. It omits taken groups: they are trained by then, and a resumed run begins
        with a publish, which frees their slots."""
        return {
            "started": self._started,
            "in_flight": list(self._in_flight.items()),
            "dropped": dict(self.dropped),
            "dropped_in_a_row": self._dropped_in_a_row,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._started, self._dropped_in_a_row = state["started"], state["dropped_in_a_row"]
        self.dropped.update(state["dropped"])
        for order, group in state["in_flight"]:
            self._in_flight[order] = [_trajectory(each) for each in group] if group else None
            if not group:
                self._replay.append(order)
        self._held = len(self._in_flight)

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.set()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(self._error)

    def _ready(self, count: int) -> bool:
        oldest = list(self._in_flight.values())[:count]
        return len(oldest) == count and None not in oldest

    def _free(self, count: int) -> None:
        self._held -= count
        self._changed.set()
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Give free slots to the waiting `admit` calls in their order. No later call overtakes one about to wake."""
        while self._waiting and (self._replay or self._held < self.slots):
            waiter = self._waiting.popleft()
            if waiter.done():  # cancelled while it waited
                continue
            if self._replay:
                waiter.set_result(Ticket(self._replay.popleft()))
                continue
            ticket = Ticket(self._started)
            self._started += 1
            self._held += 1
            self._in_flight[ticket.order] = None
            waiter.set_result(ticket)


def _trajectory(saved: Mapping[str, Any]) -> Trajectory:
    """Return a trajectory of a checkpoint, which is JSON."""
    made = Trajectory(**saved)
    made.images = [PlacedImage.of_json(each) for each in saved.get("images", ())]
    return made
