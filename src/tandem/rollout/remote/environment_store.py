"""The environment's store on a rollout service: get tickets from it and put groups into it.

consumes: tickets                waits for: a slot at the service, and room for one more group here
produces: groups and drops       with idempotency keys, so that each counts once despite retries
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from tandem.errors import Conflict, GroupRefused, NotKnown
from tandem.rollout.queue.types import RegisteredEnvironment
from tandem.rollout.remote.client import ServiceClient
from tandem.rollout.wire import codec
from tandem.types import Group, Ticket

_log = logging.getLogger(__name__)

_POLL_S, _AGAIN_S = 20.0, 1.0
_NOT_ENCODED = (OverflowError, RecursionError, TypeError, ValueError)  # errors of values that cannot be encoded


class TicketStore:
    """The environment's part of a RolloutStore: admit, put, drop."""

    def __init__(self, client: ServiceClient, registration: RegisteredEnvironment, *, most_under_way: int) -> None:
        self._client, self._registration = client, registration
        self._room = asyncio.Semaphore(most_under_way)
        self._in_progress: dict[int, int] = {}
        """Ticket order to the environment id that it was given to."""
        self._environment_id: int | None = None
        self._registering = asyncio.Lock()
        self._admitting: asyncio.Task[Ticket] | None = None
        self._reports: set[asyncio.Task[None]] = set()
        self._wait_reason = ""
        self.put_groups = 0
        self.dropped: Counter[str] = Counter()

    async def admit(self) -> Ticket:
        """Return a ticket. A cancelled call leaves its request open, and the next call gets that ticket."""
        if self._admitting is None:
            self._admitting = asyncio.create_task(self._next_ticket())
        ticket = await asyncio.shield(self._admitting)
        self._admitting = None
        return ticket

    async def put(self, ticket: Ticket, group: Group) -> None:
        await self._finish(self._put(ticket, group))

    async def drop(self, ticket: Ticket, reason: str) -> None:
        await self._finish(self._drop(ticket, reason))

    async def drop_all(self, reason: str) -> None:
        """Drop every open ticket, after the producer has stopped."""
        await asyncio.gather(*(self.drop(Ticket(order), reason) for order in list(self._in_progress)))

    async def keep_alive(self) -> None:
        """Send heartbeats for ever: during a long episode there are no other calls."""
        while True:
            await asyncio.sleep(self._registration.lapse_s / 4)
            if self._environment_id is not None:
                try:
                    await self._client.post(f"/v2/environments/{self._environment_id}/alive", {})
                except (NotKnown, Conflict):
                    self._environment_id = None

    async def leave(self) -> None:
        """Unregister: the tickets and the share go to other environments at once."""
        if self._admitting is not None:
            self._admitting.cancel()
        await asyncio.gather(*self._reports, return_exceptions=True)
        if self._environment_id is not None:
            await self._client.post(f"/v2/environments/{self._environment_id}/disconnect", {})
            self._environment_id = None

    async def _finish(self, report: Coroutine[Any, Any, None]) -> None:
        """Finish a report even if the caller is cancelled: an unreported ticket would block every batch."""
        task = asyncio.create_task(report)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
        await asyncio.shield(task)

    async def _next_ticket(self) -> Ticket:
        await self._room.acquire()
        while True:
            environment = await self._registered()
            body = {"environment": environment, "count": 1, "wait_s": _POLL_S}
            try:
                reply = await self._client.post("/v2/tickets", body, wait_s=_POLL_S)
            except NotKnown:
                self._forget(environment)  # another run began at the service
                continue
            except Conflict as error:
                await self._wait(error)
                continue
            self._wait_reason = ""
            if reply["tickets"]:
                ticket = Ticket(int(reply["tickets"][0]))
                self._in_progress[ticket.order] = environment
                return ticket

    async def _put(self, ticket: Ticket, group: Group) -> None:
        environment = self._close_ticket(ticket)
        try:
            frame = bytes(codec.encode(group, environment=environment, ticket=ticket.order).frame)
            await self._client.post(f"/v2/groups?environment={environment}", frame, content_type=codec.BINARY)
        except (NotKnown, Conflict) as error:
            self.dropped["lapsed"] += 1
            _log.warning("group %d was not stored: %s", ticket.order, error)
        except (GroupRefused, *_NOT_ENCODED) as error:
            _log.warning("group %d was refused: %s: %s", ticket.order, type(error).__name__, error)
            await self._report_drop(ticket, environment, "refused")
        else:
            self.put_groups += 1

    async def _drop(self, ticket: Ticket, reason: str) -> None:
        await self._report_drop(ticket, self._close_ticket(ticket), reason)

    async def _report_drop(self, ticket: Ticket, environment: int, reason: str) -> None:
        self.dropped[reason] += 1
        try:
            await self._client.post(f"/v2/tickets/{ticket.order}/drop", {"environment": environment, "reason": reason})
        except (NotKnown, Conflict) as error:
            _log.info("ticket %d had lapsed: %s", ticket.order, error)

    async def _registered(self) -> int:
        async with self._registering:
            while self._environment_id is None:
                try:
                    reply = await self._client.post("/v2/environments", asdict(self._registration))
                except Conflict as error:
                    await self._wait(error)
                    continue
                self._environment_id = int(reply["id"])
                _log.info("registered at %s as %s", self._client.url, reply["name"])
            return self._environment_id

    async def _wait(self, error: Conflict) -> None:
        """Log why registration must wait (no trainer yet, or no share left), and pause."""
        if str(error) != self._wait_reason:
            self._wait_reason = str(error)
            _log.warning("waiting: %s", error)
        await asyncio.sleep(_AGAIN_S)

    def _forget(self, environment: int) -> None:
        if self._environment_id == environment:
            self._environment_id = None

    def _close_ticket(self, ticket: Ticket) -> int:
        environment = self._in_progress.pop(ticket.order)
        self._room.release()
        return environment
