"""`/mcp` on a control server: the assistant's tools over streamable HTTP, for each key at a desk of its own.

consumes: requests that the access gate has let through   waits for: what the tools wait for
produces: answers and streams of the protocol

What is heavy is imported at the first request, off the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.service import turn_away

_SESSIONS, _IDLE_S, _DESKS = 200, 1800.0, 1000


class AssistantDoor:
    """An ASGI app. `url`: where this server answers itself; `mirrors`: where it keeps the files of runs."""

    def __init__(self, url: Callable[[], str], mirrors: Path) -> None:
        self._url, self._mirrors = url, mirrors
        self._desks: OrderedDict[str, Any] = OrderedDict()
        self._opening, self._ended = asyncio.Lock(), asyncio.Event()
        self._manager: Any = None
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._ended.is_set():
            return await turn_away(RequestRefused(503, "the service is ending"), scope, receive, send)
        from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
        from mcp.server.auth.provider import AccessToken

        async with self._opening:
            manager = self._manager or await self._open()
        # A session is its key's: with another it does not exist.
        named = _name_of(Headers(scope=scope).get("authorization", ""))
        user = AuthenticatedUser(AccessToken(token=named, client_id=named, scopes=[]))
        await manager.handle_request({**scope, "user": user}, receive, send)

    def end(self) -> None:
        """End the sessions and their streams."""
        self._ended.set()

    async def close(self) -> None:
        """Wait until the sessions have ended."""
        self.end()
        if self._running is not None:
            with suppress(asyncio.CancelledError, Exception):
                await self._running

    async def _open(self) -> Any:
        manager, opened = await asyncio.to_thread(self._made), asyncio.Event()

        async def run() -> None:
            async with manager.run():
                opened.set()
                await self._ended.wait()

        self._running = asyncio.create_task(run())
        await opened.wait()
        self._manager = manager
        return manager

    def _made(self) -> Any:
        from mcp.server.transport_security import TransportSecuritySettings

        from tandem.assistant.server import server_of

        server = server_of(self._desk_for, self._ended)
        checked = TransportSecuritySettings(enable_dns_rebinding_protection=False)  # the access gate has done it
        server.streamable_http_app(session_idle_timeout=_IDLE_S, max_sessions=_SESSIONS, transport_security=checked)
        return server.session_manager

    def _desk_for(self, context: Any) -> Any:
        """Return the desk of the key that sent this request."""
        from tandem.assistant.desk import ServerDesk

        authorization = context.request_context.request.headers["authorization"]
        name = _name_of(authorization)
        if name not in self._desks:
            self._desks[name] = ServerDesk(self._url(), authorization.removeprefix("Bearer "), self._mirrors)
            while len(self._desks) > _DESKS:
                self._desks.popitem(last=False)
        return self._desks[name]


def _name_of(authorization: str) -> str:
    return hashlib.sha256(authorization.encode()).hexdigest()
