"""An environment's end of a rollout service: tickets come from there, and groups go there.

consumes: tickets                waits for: a slot there, and room for one more group here
produces: groups and drops       under keys, so that each counts once whatever happens on the way
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import Conflict, GroupRefused, NotKnown
from tandem.rollout.remote.client import ServiceClient
from tandem.rollout.wire import codec
from tandem.types import Group, Ticket

_log = logging.getLogger(__name__)

_POLL_S, _AGAIN_S = 20.0, 1.0
_NOT_ENCODED = (OverflowError, RecursionError, TypeError, ValueError)  # what messages may hold that no wire carries


@dataclass(frozen=True, slots=True)
class EnvironmentRegistration:
    """As which environment."""

    name: str
    weight: float = 1.0
    min_share: float = 0.0
    group_size: int = 0
    lapse_s: float = 300.0
    tokenizer: str = ""
    """Its fingerprint: a trainer with another one refuses."""


class TicketStore:
    """The environment's verbs of a RolloutStore: admit, put, drop."""

    def __init__(self, client: ServiceClient, registration: EnvironmentRegistration, *, most_under_way: int) -> None:
        self._client, self._registration = client, registration
        self._room = asyncio.Semaphore(most_under_way)
        self._under_way: dict[int, int] = {}
        """Order to the seat that it was given to."""
        self._seat: int | None = None
        self._registering = asyncio.Lock()
        self._asking: asyncio.Task[Ticket] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._waits_for = ""
        self.put_groups = 0
        self.dropped: Counter[str] = Counter()

    async def admit(self) -> Ticket:
        """Cancelled, it leaves its question standing: a ticket that comes late is the next one's."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        ticket = await asyncio.shield(self._asking)
        self._asking = None
        return ticket

    async def put(self, ticket: Ticket, group: Group) -> None:
        await self._finish(self._put(ticket, group))

    async def drop(self, ticket: Ticket, reason: str) -> None:
        await self._finish(self._drop(ticket, reason))

    async def drop_all(self, reason: str) -> None:
        """Every ticket that is held: whoever played has stopped."""
        await asyncio.gather(*(self.drop(Ticket(order), reason) for order in list(self._under_way)))

    async def keep_alive(self) -> None:
        """While an episode takes long, nothing else is said."""
        while True:
            await asyncio.sleep(self._registration.lapse_s / 4)
            if self._seat is not None:
                try:
                    await self._client.post(f"/v2/environments/{self._seat}/alive", {})
                except (NotKnown, Conflict):
                    self._seat = None

    async def leave(self) -> None:
        """Its tickets and its share go to the others at once."""
        if self._asking is not None:
            self._asking.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
        if self._seat is not None:
            await self._client.post(f"/v2/environments/{self._seat}/disconnect", {})
            self._seat = None

    async def _finish(self, telling: Coroutine[Any, Any, None]) -> None:
        """Also if whoever waits for it is cancelled: a ticket that nobody told of would hold up every batch."""
        task = asyncio.create_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        await asyncio.shield(task)

    async def _ask(self) -> Ticket:
        await self._room.acquire()
        while True:
            seat = await self._registered()
            body = {"environment": seat, "count": 1, "wait_s": _POLL_S}
            try:
                told = await self._client.post("/v2/tickets", body, wait_s=_POLL_S)
            except NotKnown:
                self._forget(seat)  # the service began anew
                continue
            except Conflict as error:
                await self._wait(error)
                continue
            self._waits_for = ""
            if told["tickets"]:
                ticket = Ticket(int(told["tickets"][0]))
                self._under_way[ticket.order] = seat
                return ticket

    async def _put(self, ticket: Ticket, group: Group) -> None:
        seat = self._ended(ticket)
        try:
            frame = bytes(codec.encode(group, environment=seat, ticket=ticket.order).frame)
            await self._client.post(f"/v2/groups?environment={seat}", frame, content_type=codec.BINARY)
        except (NotKnown, Conflict) as error:
            self.dropped["lapsed"] += 1
            _log.warning("group %d came to nothing: %s", ticket.order, error)
        except (GroupRefused, *_NOT_ENCODED) as error:
            _log.warning("group %d is refused: %s: %s", ticket.order, type(error).__name__, error)
            await self._tell_dropped(ticket, seat, "refused")
        else:
            self.put_groups += 1

    async def _drop(self, ticket: Ticket, reason: str) -> None:
        await self._tell_dropped(ticket, self._ended(ticket), reason)

    async def _tell_dropped(self, ticket: Ticket, seat: int, reason: str) -> None:
        self.dropped[reason] += 1
        try:
            await self._client.post(f"/v2/tickets/{ticket.order}/drop", {"environment": seat, "reason": reason})
        except (NotKnown, Conflict) as error:
            _log.info("ticket %d had lapsed: %s", ticket.order, error)

    async def _registered(self) -> int:
        async with self._registering:
            while self._seat is None:
                body: Mapping[str, Any] = {
                    "name": self._registration.name, "weight": self._registration.weight,
                    "min_share": self._registration.min_share, "group_size": self._registration.group_size,
                    "lapse_s": self._registration.lapse_s, "tokenizer": self._registration.tokenizer,
                }  # fmt: skip
                try:
                    told = await self._client.post("/v2/environments", body)
                except Conflict as error:
                    await self._wait(error)
                    continue
                self._seat = int(told["id"])
                _log.info("registered at %s as %s", self._client.url, told["name"])
            return self._seat

    async def _wait(self, error: Conflict) -> None:
        """There is no trainer yet, or no share is left: somebody else has to come, or to go."""
        if str(error) != self._waits_for:
            self._waits_for = str(error)
            _log.warning("waiting: %s", error)
        await asyncio.sleep(_AGAIN_S)

    def _forget(self, seat: int) -> None:
        if self._seat == seat:
            self._seat = None

    def _ended(self, ticket: Ticket) -> int:
        seat = self._under_way.pop(ticket.order)
        self._room.release()
        return seat
