"""The rollout store of one process.

consumes: finished groups               waits for: a slot (admit), the oldest start (take)
produces: groups, oldest started first

The bound: a group started while the engine held version u occupies a slot from then on, and so does every group
started before it that is not yet released. Slots are released only when the engine holds the version that their groups
made. There are (max_lag + 1) * groups_per_step, so the group is trained on at version u + max_lag at the latest.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.errors import Starved, StoreError, StoreTimeout
from tandem.types import Group, Ticket, Trajectory


class MemoryStore:
    def __init__(self, slots: int, *, max_dropped: int = 256, take_timeout_s: float = 600.0) -> None:
        self.slots = slots
        self.dropped: Counter[str] = Counter()
        self._max_dropped, self._take_timeout_s = max_dropped, take_timeout_s
        self._started = self._held = self._dropped_in_a_row = 0
        self._in_flight: dict[int, Group | None] = {}
        """By order of start; None until it is put. What is taken leaves, but holds its slot until released."""
        self._again: deque[int] = deque()
        """Under way when another process was killed: they hold their slots, and are played anew."""
        self._asking: deque[asyncio.Future[Ticket]] = deque()
        self._news = asyncio.Event()
        self._error: BaseException | None = None

    async def admit(self) -> Ticket:
        if self._error is not None:
            raise self._error
        turn: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._asking.append(turn)
        self._let_in()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:  # it was let in, and will never know
                del self._in_flight[turn.result().order]
                self._free(1)
            raise

    async def put(self, ticket: Ticket, group: Group) -> None:
        if ticket.order not in self._in_flight or self._in_flight[ticket.order] is not None:
            raise StoreError(f"store: ticket {ticket.order} is not waiting for a group; it was put or dropped before")
        if not group:
            raise StoreError(f"store: ticket {ticket.order} was put with an empty group; drop it with a reason instead")
        self._in_flight[ticket.order] = group
        self._dropped_in_a_row = 0
        self._news.set()

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
        self._news.set()

    async def take(self, count: int) -> list[Group]:
        if count > self.slots:
            raise StoreError(f"store: take({count}) can never be served by {self.slots} slots")
        try:
            async with asyncio.timeout(self._take_timeout_s):
                while self._error is None and not self._ready(count):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise StoreTimeout(
                f"store: {count} groups did not finish within {self._take_timeout_s:g} s (train.group_timeout_s); "
                f"{len(self._in_flight)} are under way"
            ) from None
        if self._error is not None:  # raised out here: some of our errors are TimeoutErrors themselves
            raise self._error
        oldest = list(self._in_flight)[:count]  # a dict keeps insertion order, and tickets are made in order
        return [group for order in oldest if (group := self._in_flight.pop(order)) is not None]

    async def release(self, count: int) -> None:
        taken = self._held - len(self._in_flight)
        if count > taken:
            raise StoreError(f"store: release({count}), but only {taken} taken groups hold slots")
        self._free(count)

    async def ack(self, groups: Sequence[Group]) -> None:
        """Nothing here outlives the process, so there is nothing to forget."""

    def state(self) -> dict[str, Any]:
        """What is taken is trained on by now, and its slots are free in whoever goes on: it begins with a publish."""
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
            self._in_flight[order] = [Trajectory(**each) for each in group] if group else None
            if not group:
                self._again.append(order)
        self._held = len(self._in_flight)

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._news.set()
        while self._asking:
            turn = self._asking.popleft()
            if not turn.done():
                turn.set_exception(self._error)

    def _ready(self, count: int) -> bool:
        oldest = list(self._in_flight.values())[:count]
        return len(oldest) == count and None not in oldest

    def _free(self, count: int) -> None:
        self._held -= count
        self._news.set()
        self._let_in()

    def _let_in(self) -> None:
        """Hands slots over in the order in which they were asked for: nobody overtakes who is about to wake up."""
        while self._asking and (self._again or self._held < self.slots):
            turn = self._asking.popleft()
            if turn.done():  # cancelled while it waited
                continue
            if self._again:
                turn.set_result(Ticket(self._again.popleft()))
                continue
            ticket = Ticket(self._started)
            self._started += 1
            self._held += 1
            self._in_flight[ticket.order] = None
            turn.set_result(ticket)
