"""Tell a client when a run that it subscribed to has moved: `tandem://runs/RUN/status` and `/log`.

consumes: looks at the run, one a second   waits for: the run, and the end of the client's stream or session
produces: notifications/resources/updated

A client of the newest protocol opens a stream, `subscriptions/listen`; one with a session sends `resources/subscribe`.
Each looks with the caller's own key, so that a run that the caller may not see is refused and never told of.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import ResourceUpdated
from mcp_types import (
    INVALID_PARAMS,
    EmptyResult,
    SubscribeRequestParams,
    SubscriptionsListenRequestParams,
    SubscriptionsListenResult,
    UnsubscribeRequestParams,
)

from tandem.assistant.calls import DeskFor
from tandem.assistant.desk import Desk
from tandem.errors import ControlNotAllowed, ControlNotKnown, TandemError

MOST_FOLLOWED = 20
"""Resources that one caller follows at a time: each is looked at once a second."""
_LOOK_S = 1.0
_URI = re.compile(r"tandem://runs/([^/]+)/(spec|status|log)")
_STATE = "tandem-subscriptions"
Tell = Callable[[str], Awaitable[None]]


def add_subscriptions(server: MCPServer, desk_for: DeskFor, ended: asyncio.Event) -> None:
    """Give a server, made with `subscriptions=False`, subscriptions to runs. `ended`: then streams end."""
    made = _Subscriptions(lambda ctx: desk_for(Context(request_context=ctx, mcp_server=server)), ended)
    # The SDK names this as the way to serve methods that the newest protocol has not.
    add = server._lowlevel_server.add_request_handler  # pyright: ignore[reportPrivateUsage]
    add("subscriptions/listen", SubscriptionsListenRequestParams, made.listen)
    add("resources/subscribe", SubscribeRequestParams, made.subscribe)
    add("resources/unsubscribe", UnsubscribeRequestParams, made.unsubscribe)


class _Subscriptions:
    def __init__(self, desk_for: Callable[[Any], Desk], ended: asyncio.Event) -> None:
        self._desk_for, self._ended = desk_for, ended
        self._followed: dict[Desk, int] = {}

    async def listen(self, ctx: Any, params: SubscriptionsListenRequestParams) -> SubscriptionsListenResult:
        """Serve one stream. Its bus is its own, so that no other caller's looks reach it."""
        desk, bus = self._desk_for(ctx), InMemorySubscriptionBus()
        stream = ListenHandler(bus)

        async def tell(uri: str) -> None:
            await bus.publish(ResourceUpdated(uri=uri))

        async def end() -> None:
            await self._ended.wait()
            stream.close()

        uris = sorted(set(params.notifications.resource_subscriptions or ()))
        looks = list[asyncio.Task[None]]()
        self._take(desk, len(uris))
        try:
            firsts = [await _first(desk, uri) for uri in uris]
            looks += [asyncio.create_task(follow(desk, *each, tell)) for each in zip(uris, firsts, strict=True)]
            looks.append(asyncio.create_task(end()))
            return await stream(ctx, params)
        finally:
            self._take(desk, -len(uris))
            for each in looks:
                each.cancel()

    async def subscribe(self, ctx: Any, params: SubscribeRequestParams) -> EmptyResult:
        """Follow a resource until the client unsubscribes or its session ends."""
        desk, uri, connection = self._desk_for(ctx), params.uri, ctx.session._connection
        if _STATE not in connection.state:
            connection.state[_STATE] = {}
            connection.exit_stack.callback(lambda: [each.cancel() for each in connection.state[_STATE].values()])
        mine: dict[str, asyncio.Task[None]] = connection.state[_STATE]
        if uri in mine:
            return EmptyResult()
        self._take(desk, 1)
        try:
            first = await _first(desk, uri)
        except BaseException:
            self._take(desk, -1)
            raise
        mine[uri] = asyncio.create_task(follow(desk, uri, first, ctx.session.send_resource_updated))
        mine[uri].add_done_callback(lambda _: self._take(desk, -1))
        return EmptyResult()

    async def unsubscribe(self, ctx: Any, params: UnsubscribeRequestParams) -> EmptyResult:
        if (task := ctx.session._connection.state.get(_STATE, {}).pop(params.uri, None)) is not None:
            task.cancel()
        return EmptyResult()

    def _take(self, desk: Desk, count: int) -> None:
        """Count what a caller follows; refuse what is too much."""
        now = self._followed.get(desk, 0) + count
        if count > 0 and now > MOST_FOLLOWED:
            raise MCPError(INVALID_PARAMS, f"at most {MOST_FOLLOWED} resources are followed; get_run looks once")
        self._followed[desk] = now
        if not now:
            del self._followed[desk]


async def _first(desk: Desk, uri: str) -> Any:
    """Look at a resource for the first time. MCPError if the caller may not see it."""
    try:
        return await asyncio.to_thread(seen, desk, uri)
    except (TandemError, OSError, ValueError) as error:
        raise MCPError(INVALID_PARAMS, str(error)[:500]) from error


async def follow(desk: Desk, uri: str, last: Any, tell: Tell) -> None:
    """Tell of each change of a resource, until this is cancelled or the caller may not see it any more."""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            now = await asyncio.to_thread(seen, desk, uri)
        except (ControlNotAllowed, ControlNotKnown):
            return
        except (TandemError, OSError, ValueError):  # the server is away, or a file is being replaced
            continue
        if now != last:
            last = now
            with suppress(ConnectionError):  # its session is ending
                await tell(uri)


def seen(desk: Desk, uri: str) -> Any:
    """Return what a resource shows, in few words: another value means that it changed."""
    match = _URI.fullmatch(uri)
    if match is None:
        raise ValueError(f"uri = '{uri[:80]}': write tandem://runs/RUN/status, or /log")
    run, what = match.groups()
    if what == "status":
        sight = desk.sight(run)
        return [sight.get(each) for each in ("state", "stage", "step", "verdict")]
    place = desk.place(run)
    file = place / {"log": "log.txt", "spec": "spec.toml"}[what]
    return file.stat().st_size if file.exists() else 0
