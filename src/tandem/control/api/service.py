"""The control plane's service: its routes, its loop, and who may call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from fastapi import APIRouter
from starlette.types import Receive, Scope, Send

from tandem.control import audit
from tandem.control.api.agent_routes import AgentRoutes
from tandem.control.api.deployment_routes import DeploymentRoutes
from tandem.control.api.login_routes import BEGIN, DONE, PATH, LoginRoutes
from tandem.control.api.org_routes import OrgRoutes
from tandem.control.api.package_routes import PackageRoutes
from tandem.control.api.requests import Plane, authenticate
from tandem.control.api.run_routes import READ_BYTES, RunRoutes
from tandem.control.api.secret_routes import SecretRoutes
from tandem.control.api.upkeep import look_after_deployments
from tandem.control.api.view_routes import view_routes
from tandem.control.decide import LEASE_MS
from tandem.control.rates import RateLimit
from tandem.dashboard.service import page_paths
from tandem.errors import StoreError
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.service import AppRoute, Service, turn_away
from tandem.shapes.agent import APPEND_BYTES, PIECE_BYTES

_log = logging.getLogger(__name__)
REQUESTS_PER_S = 50.0


class AssistantApp(Protocol):
    """An ASGI app that lets assistants look at runs (tandem.assistant.door)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def end(self) -> None:
        """End its streams."""
        ...

    async def close(self) -> None: ...


async def _no_assistant(scope: Scope, receive: Receive, send: Send) -> None:
    missing = RequestRefused(501, 'this server has no /mcp: install "tandem-rl[control,mcp]" and start it again')
    await turn_away(missing, scope, receive, send)


def control_service(
    plane: Plane,
    loop: Callable[[], Awaitable[None]],
    close: Callable[[], Awaitable[None]] | None = None,
    *,
    requests_per_s: float = REQUESTS_PER_S,
    assistant: AssistantApp | None = None,
) -> Service:
    """Build the service. `loop` runs beside the requests, from the first to the last; `close` is called after it.
    `requests_per_s`: of each key; 0: no limit. `assistant`: what answers /mcp."""
    runs, agents, views = RunRoutes(plane), AgentRoutes(plane), view_routes(plane)
    router = APIRouter()
    deployments = DeploymentRoutes(plane)
    more = (LoginRoutes(plane), OrgRoutes(plane), SecretRoutes(plane), PackageRoutes(plane))
    for each in (runs, agents, deployments, *more, views):
        router.include_router(each.router)
    tasks: list[asyncio.Task[None]] = []

    async def audit_kept() -> None:
        while True:
            await asyncio.sleep(audit.EVERY_S)
            try:
                await plane.audit.keep(plane.store)
            except (StoreError, OSError) as error:  # full or gone; it is tried again
                _log.error("the audit log's newest row was not written down: %s", error)

    died: list[str] = []

    async def looked_after() -> None:
        try:
            await loop()
        except Exception as error:
            died.append(f"the loop over the runs has ended: {type(error).__name__}: {error}; restart the control plane")
            raise

    def ending() -> None:
        runs.ended.set()
        views.ended.set()
        if assistant is not None:
            assistant.end()

    async def start() -> None:
        await plane.audit.keep(plane.store)
        tasks.extend(map(asyncio.create_task, (looked_after(), audit_kept(), look_after_deployments(plane))))

    async def end() -> None:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        await deployments.close()
        if close is not None:
            await close()
        if assistant is not None:
            await assistant.close()
        with suppress(StoreError, OSError):
            await plane.audit.keep(plane.store)
        await asyncio.to_thread(plane.store.close)

    return Service(
        "tandem control serve",
        router,
        {
            "piece_bytes": PIECE_BYTES, "append_bytes": APPEND_BYTES, "read_bytes": READ_BYTES,
            "lease_s": LEASE_MS // 1000,
        },
        start=start,
        close=end,
        why_unfit=lambda: plane.store.broken or (died[0] if died else ""),
        gzip=True,
        open_paths=page_paths() | {"/openapi.json", PATH, BEGIN, DONE},
        landing_paths=frozenset({DONE}),
        hot=[*runs.hot, *agents.hot],
        apps=[AppRoute("/mcp", assistant or _no_assistant)],
        ending=ending,
        authenticate=partial(authenticate, plane.callers, RateLimit(requests_per_s)),
    )  # fmt: skip
