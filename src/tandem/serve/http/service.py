"""What every Tandem service shares: who may come in, what a refusal looks like, and the books it keeps open.

At the door, in this order: Host, Origin, token, type and size of the body. A route sees nothing that failed one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.errors import TandemError
from tandem.serve.http.off_loop import OffLoop
from tandem.serve.http.openapi_document import Endpoints, document, speaks
from tandem.serve.http.refusals import RequestRefused, as_refused, refusal

_log = logging.getLogger(__name__)

BODY_BYTES = 16 * 2**20
_CLOSE_S = 3.0
_AT_ONCE = 2**20  # bytes that are unpacked without a second thought, and on the event loop
_MAX_RATIO = 100
_BODIES_AT_A_TIME = 16  # as large as they may be
STALL_S = 15.0  # without a byte of a body, and its sender has hung
SLOW_S, _SLOW_BYTES_S = 60.0, 4096  # a body comes within that time, and what it takes at that rate
ROOM_S = 5.0  # for room among the bodies, where a client should not be told of it
_SMALL_BYTES = 64 * 2**10  # of a body that is refused: read, so that the connection can go on
_LINGER_S, LINGER_BYTES = 1.0, 32 * 2**20  # of a larger one: read and dropped before the connection ends

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

_BODY, _LET_GO, _WHOLE = "tandem.body", "tandem.let_go", "tandem.whole"

T = TypeVar("T")


class HotRoute(Route):
    """For what is called all the time: the answer is made by `endpoint` alone, without what FastAPI does around it,
    which takes longer than a small answer."""

    def __init__(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str = "POST") -> None:
        super().__init__(path, endpoint, methods=[method])

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self}  # for the books


@dataclass(frozen=True)
class Service:
    """What one service brings to the app: its routes, numbers for /limits and /metrics, and what ends with it."""

    name: str
    router: APIRouter
    limits: Mapping[str, int] = field(default_factory=dict[str, int])
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    close: Callable[[], Awaitable[None]] | None = None
    """Once all requests have ended."""
    why_unfit: Callable[[], str] = lambda: ""
    """Why it cannot answer, for /health; empty if it can."""
    start: Callable[[], Awaitable[None]] | None = None
    """Before the first request, on the event loop."""
    body_types: frozenset[str] = frozenset({"application/json"})
    gzip: bool = False
    """Whether bodies may come compressed; unpacked they are held to the same cap."""
    open_paths: frozenset[str] = frozenset()
    """Beside /health: who calls them needs no token."""
    patient_paths: frozenset[str] = frozenset()
    """Their clients repeat a 5xx alone: bodies wait for room, and are told 507 or 503 instead of 429 or 408."""
    hot: Sequence[HotRoute] = ()
    """Tried before the router."""
    ending: Callable[[], None] = lambda: None
    """When the server was told to end: streams without an end of their own are to end now."""


def create_app(service: Service, *, token: str, hosts: frozenset[str] | None, body_bytes: int = BODY_BYTES) -> FastAPI:
    """`hosts`: names under which the service may be addressed; None allows any (a public bind)."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if service.start is not None:
            await service.start()
        yield
        if service.close is not None:
            async with asyncio.timeout(_CLOSE_S):
                await service.close()

    endpoints = Endpoints()
    app = FastAPI(
        title=service.name, routes=[*service.hot], lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None,
        generate_unique_id_function=endpoints.name,
    )  # fmt: skip
    app.state.ending, app.state.aside = service.ending, OffLoop()
    registry = CollectorRegistry()

    @app.get("/health")
    async def health() -> JSONResponse:
        why = service.why_unfit()
        return JSONResponse({"status": why}, 503) if why else JSONResponse({"status": "ok"})

    @app.get("/openapi.json")
    async def openapi(request: Request) -> JSONResponse:
        """This document."""
        made = partial(document, app, endpoints, service.hot, service.open_paths | {"/health"})
        return JSONResponse(await aside(request)(made))

    @app.get("/metrics")
    @speaks(answers=("text/plain",))
    async def metrics() -> Response:
        text = generate_latest(registry) + generate_latest(service.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/limits")
    async def limits() -> JSONResponse:
        return JSONResponse({"body_bytes": body_bytes, **service.limits})

    app.include_router(service.router)
    app.add_exception_handler(RequestRefused, _answer)
    app.add_exception_handler(TandemError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(RequestValidationError, _answer)
    app.add_exception_handler(Exception, _answer)
    app.add_middleware(AccessGate, service=service, token=token, hosts=hosts, body_bytes=body_bytes)
    app.add_middleware(Meter, registry=registry)  # added last, so outermost: refusals at the gate are counted too
    return app


# --- refusals


async def _answer(request: Request, error: Exception) -> Response:
    refused = as_refused(error)
    if refused.status >= 500:
        _log.error("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error)
    return refusal(refused, request.scope, {"Allow": ", ".join(_allowed(request))} if refused.status == 405 else {})


def _allowed(request: Request) -> list[str]:
    """What may be done with this path: several routes can have it, each with its methods."""
    asked: list[Scope] = [{**request.scope, "method": method} for method in _METHODS]
    matched = (scope for scope in asked if any(each.matches(scope)[0] is Match.FULL for each in request.app.routes))
    return [scope["method"] for scope in matched]


async def turn_away(error: RequestRefused, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body was not read, and end its connection if that body is not small: nothing of it is
    kept, and after a moment nothing more of it is read."""
    headers = Headers(scope=scope)
    unread = _has_body(headers) and not scope.get(_WHOLE)
    if unread and not error.close and not 0 <= _said_bytes(headers, -1) <= _SMALL_BYTES:
        error.close = True
        if "expect" not in headers:  # a client that asks first sends nothing once it has the answer
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    await _until_read(receive, LINGER_BYTES)
    await refusal(error, scope)(scope, receive, send)


async def _until_read(receive: Receive, most: int) -> None:
    """A client that is still sending when its connection ends may never see the answer."""
    while most > 0:
        message = await receive()
        most -= len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


# --- the door


class AccessGate:
    def __init__(
        self, app: ASGIApp, *, service: Service, token: str, hosts: frozenset[str] | None, body_bytes: int
    ) -> None:
        self.app, self.service, self.hosts, self.body_bytes = app, service, hosts, body_bytes
        self.held = 0
        self.open_paths = {"/health"} | service.open_paths
        self.credential = b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        assert scope["type"] == "http", "websockets are off: they would pass by these checks"
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            is_open = scope["path"] in self.open_paths
            self._check_origin(headers, needs_token=not is_open)
            if not is_open:
                self._check_token(headers)
            if _has_body(headers):
                self._check_type(headers)
                return await self._with_body(headers, scope, receive, send)
        except RequestRefused as error:
            return await turn_away(error, scope, receive, send)
        await self.app(scope, receive, send)

    async def _with_body(self, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        """Held in memory from its first byte until it was parsed, or answered: what it takes, and before it is
        whole what has come of it, is counted for that time."""
        patient, room = scope["path"] in self.service.patient_paths, 0

        def now_takes(size: int) -> None:
            nonlocal room
            self.held += size - room
            room = size

        async def grow(size: int) -> None:
            await self._room_for(size - room, patient=patient)
            now_takes(size)

        try:
            scope[_BODY] = await self._whole_body(headers, scope, receive, grow, patient=patient)
            now_takes(len(scope[_BODY]))
            scope[_LET_GO] = lambda: now_takes(0)
            await self.app(scope, _played_back(scope, receive), send)
        finally:
            now_takes(0)

    async def _room_for(self, size: int, *, patient: bool) -> None:
        until = time.monotonic() + (ROOM_S if patient else 0)
        while self.held + size > _BODIES_AT_A_TIME * self.body_bytes:
            if time.monotonic() >= until:
                raise RequestRefused(
                    507 if patient else 429, f"bodies of {self.held} bytes are under way; send it again"
                )
            await asyncio.sleep(0.05)

    def _check_host(self, headers: Headers) -> None:
        """A name that is not ours comes from a browser whose DNS was rebound to this address."""
        named = headers.getlist("host")
        if len(named) != 1:
            raise RequestRefused(421, "the request must carry one Host header")
        name, _, port = named[0].lower().rpartition(":")
        host = name if name and port.isdigit() else named[0].lower()
        if self.hosts is not None and host not in self.hosts:
            raise RequestRefused(421, f"this service is not '{host}'; it answers to {', '.join(sorted(self.hosts))}")

    def _check_origin(self, headers: Headers, *, needs_token: bool) -> None:
        """Browsers send Origin; a page from elsewhere has no business here, token or not. With the GET of an image they
        send none: where no token is asked for, another port of this host is elsewhere too."""
        ours = {f"{scheme}://{headers['host'].lower()}" for scheme in ("http", "https")}
        if any(origin.lower() not in ours for origin in headers.getlist("origin")):
            raise RequestRefused(403, "pages of another origin may not call this service")
        site = headers.get("sec-fetch-site", "none")
        if site == "cross-site" or not (needs_token or site in ("same-origin", "none")):
            raise RequestRefused(403, "pages of another site may not call this service")

    def _check_token(self, headers: Headers) -> None:
        if not hmac.compare_digest(headers.get("authorization", "").encode(), self.credential):
            raise RequestRefused(401, "send 'Authorization: Bearer TOKEN'; the token is in the service's token file")

    def _check_type(self, headers: Headers) -> None:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in self.service.body_types:
            known = " or ".join(sorted(self.service.body_types))
            raise RequestRefused(415, f"Content-Type must be {known}, not '{kind}'", field="content-type")
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding != "identity" and not (self.service.gzip and encoding == "gzip"):
            raise RequestRefused(415, "bodies of this encoding are not taken; send it plain", field="content-encoding")

    async def _whole_body(
        self,
        headers: Headers,
        scope: Scope,
        receive: Receive,
        grow: Callable[[int], Awaitable[None]],
        *,
        patient: bool,
    ) -> bytes:
        """Reads the body up to the cap, before anything parses it."""
        too_large = RequestRefused(413, f"the body is larger than {self.body_bytes} bytes")
        said = _said_bytes(headers, 0)
        if said > self.body_bytes:
            raise too_large
        await self._room_for(said, patient=patient)
        unseen = min(said or self.body_bytes, self.body_bytes, _AT_ONCE)  # what may have come before it is handed on
        await grow(unseen)
        parts, size, more = list[bytes](), 0, True
        began = heard = asyncio.get_running_loop().time()
        while more:
            try:
                async with asyncio.timeout_at(min(heard + STALL_S, began + SLOW_S + size / _SLOW_BYTES_S)):
                    message = await receive()
            except TimeoutError:
                slow = f"the body comes too slowly: {size} bytes so far"
                raise RequestRefused(503 if patient else 408, slow, close=True) from None
            if message["type"] == "http.disconnect":
                raise RequestRefused(499, "the client hung up")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            scope[_WHOLE] = not more
            if size > self.body_bytes:
                raise too_large
            await grow(max(size, unseen))
            if parts[-1]:
                heard = asyncio.get_running_loop().time()
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if not _is_packed(headers):
            return body
        await grow(_most_plain(size, self.body_bytes))
        if size > _AT_ONCE:
            return await asyncio.to_thread(gunzip, body, self.body_bytes)
        return gunzip(body, self.body_bytes)


def _most_plain(packed_bytes: int, most: int) -> int:
    """The cap, and less for what no honest text packs to: a small body must not cost much memory."""
    return min(most, max(_AT_ONCE, _MAX_RATIO * packed_bytes))


def gunzip(body: bytes, most: int) -> bytes:
    most = _most_plain(len(body), most)
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(body, most + 1)
    except zlib.error as error:
        raise RequestRefused(422, f"the body is not gzip: {error}", field="content-encoding") from None
    if len(plain) > most:
        raise RequestRefused(413, f"unpacked the body is larger than {most} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise RequestRefused(422, "the body is not one whole gzip stream", field="content-encoding")
    return plain


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _said_bytes(headers: Headers, unsaid: int) -> int:
    return int(headers.get("content-length", unsaid))


def _is_packed(headers: Headers) -> bool:
    return headers.get("content-encoding", "identity").lower() == "gzip"


def _played_back(scope: Scope, receive: Receive) -> Receive:
    """Keep the body in the scope only, so that it can be freed."""
    asked = False

    async def replay() -> Message:
        nonlocal asked
        if asked:
            return await receive()
        asked = True
        return {"type": "http.request", "body": scope[_BODY], "more_body": False}

    return replay


# --- the books


class Meter:
    """Counts every answer by route (never by path: its cardinality would be the client's to choose) and status. One
    that the end of the server cut off before it began is a 503."""

    def __init__(self, app: ASGIApp, *, registry: CollectorRegistry) -> None:
        self.app = app
        self.requests = Counter(
            "tandem_http_requests", "Answers given.", ("method", "route", "status"), registry=registry
        )
        self.seconds = Histogram(
            "tandem_http_request_seconds", "From the request to the last byte of its answer.", ("route",),
            registry=registry, buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started, status = time.perf_counter(), 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except asyncio.CancelledError:  # by uvicorn, which would log it as a fault; it closes what was begun
            if not status:
                ended = RequestRefused(503, "the service ends; send it again once it is back", close=True)
                await refusal(ended, scope)(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.requests.labels(method, route, str(status or 500)).inc()
            self.seconds.labels(route).observe(time.perf_counter() - started)


# --- for routes


def body_at_hand(request: Request) -> bytes:
    """What `await request.body()` gives, which makes a copy of it."""
    return request.scope.get(_BODY, b"")


def let_go(request: Request) -> None:
    """Free a parsed body: its memory is for other requests while this one waits."""
    request._body = b""  # pyright: ignore[reportPrivateUsage] - where Starlette keeps it for a second reader
    request.scope[_BODY] = b""
    request.scope.get(_LET_GO, lambda: None)()


def aside(request: Request) -> OffLoop:
    """Where work of this request is done that takes long, or may."""
    return request.app.state.aside


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, and cancel it when the client hangs up."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestRefused(499, "the client hung up")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
