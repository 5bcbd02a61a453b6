"""What all Tandem services share: the access gate, error responses and metrics.

The access gate checks, in this order: Host, Origin, token, type and size of the body. Routes see only requests that
pass.
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
_AT_ONCE = 2**20  # bytes that are unpacked on the event loop, and that any body may unpack to
_MAX_RATIO = 100
_BODIES_AT_A_TIME = 16  # bodies of the largest size that fit into memory together
STALL_S = 15.0  # longest time without a byte of a body
SLOW_S, _SLOW_BYTES_S = 60.0, 4096  # a body must arrive within SLOW_S plus its size at this rate
ROOM_S = 5.0  # to wait for memory for a body, on patient paths
_SMALL_BYTES = 64 * 2**10  # a refused body of up to this size is read, so that the connection can be used again
_LINGER_S, LINGER_BYTES = (
    1.0,
    32 * 2**20,
)  # the most of a larger one to read and drop before closing

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

_BODY, _LET_GO, _WHOLE = "tandem.body", "tandem.let_go", "tandem.whole"

T = TypeVar("T")


class HotRoute(Route):
    """A route for frequent calls: `endpoint` makes the whole response, without FastAPI's processing, which takes longer
    than a small response."""

    def __init__(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str = "POST") -> None:
        super().__init__(path, endpoint, methods=[method])

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self}  # for the metrics


class AppRoute(HotRoute):
    """A path that a whole ASGI app answers, by any method. The OpenAPI document does not describe it."""

    def __init__(self, path: str, app: ASGIApp) -> None:
        Route.__init__(self, path, app)
        self.app, self.methods = app, None  # it took a function for an endpoint, which answers GET


@dataclass(frozen=True)
class Service:
    """What one service adds to the app: its routes, its limits and metrics, and what to start and close."""

    name: str
    router: APIRouter
    limits: Mapping[str, int] = field(default_factory=dict[str, int])
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    close: Callable[[], Awaitable[None]] | None = None
    """Called once all requests have ended."""
    why_unfit: Callable[[], str] = lambda: ""
    """Returns why the service cannot answer, for /health; empty if it can."""
    start: Callable[[], Awaitable[None]] | None = None
    """Called before the first request, on the event loop."""
    body_types: frozenset[str] = frozenset({"application/json"})
    gzip: bool = False
    """Whether bodies may be compressed; the size limit holds for the unpacked body."""
    open_paths: frozenset[str] = frozenset()
    """Paths that need no token, besides /health."""
    landing_paths: frozenset[str] = frozenset()
    """Open paths to which pages of other sites may send a browser; the route itself checks that it was asked to."""
    patient_paths: frozenset[str] = frozenset()
    """Paths whose clients retry only after a 5xx. Bodies wait for memory, and get 507 or 503 instead of 429 or 408."""
    hot: Sequence[HotRoute] = ()
    """Routes that are matched before the router."""
    apps: Sequence[AppRoute] = ()
    ending: Callable[[], None] = lambda: None
    """Called when the server must end, to end streams that would not end by themselves."""
    authenticate: Callable[[str, Scope], None] | None = None
    """Checks the Authorization header in place of the token; raises RequestRefused, with 429 for a caller that sends
    too much, or puts the caller into the scope."""


def create_app(service: Service, *, token: str, hosts: frozenset[str] | None, body_bytes: int = BODY_BYTES) -> FastAPI:
    """Build the app. `hosts`: allowed Host names; None allows any (a public bind)."""

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
        title=service.name, routes=[*service.hot, *service.apps], lifespan=lifespan, docs_url=None, redoc_url=None,
        openapi_url=None, generate_unique_id_function=endpoints.name,
    )  # fmt: skip
    app.state.ending, app.state.aside = service.ending, OffLoop()
    registry = CollectorRegistry()

    @app.get("/health")
    async def health() -> JSONResponse:
        if why := service.why_unfit():
            return JSONResponse({"status": why, **RequestRefused(503, why).body}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/openapi.json")
    async def openapi(request: Request) -> JSONResponse:
        """This document."""
        of_all = frozenset() if service.authenticate is None else frozenset({429})
        made = partial(document, app, endpoints, service.hot, service.open_paths | {"/health"}, of_all)
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
    app.add_middleware(Meter, registry=registry)  # outermost: it also counts refusals of the access gate
    return app


# --- refusals


async def _answer(request: Request, error: Exception) -> Response:
    refused = as_refused(error)
    if refused.status >= 500:
        _log.error("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error)
    return refusal(refused, request.scope, {"Allow": ", ".join(_allowed(request))} if refused.status == 405 else {})


def _allowed(request: Request) -> list[str]:
    """Return the methods of a path; several routes may have the same path."""
    asked: list[Scope] = [{**request.scope, "method": method} for method in _METHODS]
    matched = (scope for scope in asked if any(each.matches(scope)[0] is Match.FULL for each in request.app.routes))
    return [scope["method"] for scope in matched]


async def turn_away(error: RequestRefused, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body was not read. Unless the body is small, read and drop it for a moment, then close the
    connection."""
    headers = Headers(scope=scope)
    unread = _has_body(headers) and not scope.get(_WHOLE)
    if unread and not error.close and not 0 <= _said_bytes(headers, -1) <= _SMALL_BYTES:
        error.close = True
        if "expect" not in headers:  # a client that waits for 100 Continue sends no body after this response
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    await _until_read(receive, LINGER_BYTES)
    await refusal(error, scope)(scope, receive, send)


async def _until_read(receive: Receive, most: int) -> None:
    """Read and drop a body: a client that is still sending when the connection closes may not see the response."""
    while most > 0:
        message = await receive()
        most -= len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


# --- the access gate


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
        assert scope["type"] == "http", "websockets are off, because they would bypass these checks"
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            is_open = scope["path"] in self.open_paths
            if scope["path"] not in self.service.landing_paths:
                self._check_origin(headers, needs_token=not is_open)
            if not is_open:
                self._check_token(headers, scope)
            if _has_body(headers):
                self._check_type(headers)
                return await self._with_body(headers, scope, receive, send)
        except RequestRefused as error:
            return await turn_away(error, scope, receive, send)
        await self.app(scope, receive, send)

    async def _with_body(self, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and call the app. Count the body's memory from its first byte until it is freed or the request
        is answered."""
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
                    507 if patient else 429, f"bodies of {self.held} bytes are in memory; send it again"
                )
            await asyncio.sleep(0.05)

    def _check_host(self, headers: Headers) -> None:
        """Refuse unknown Host names: a page can rebind its DNS name to this address and let a browser send requests."""
        named = headers.getlist("host")
        if len(named) != 1:
            raise RequestRefused(421, "the request must carry one Host header")
        name, _, port = named[0].lower().rpartition(":")
        host = name if name and port.isdigit() else named[0].lower()
        if self.hosts is not None and host not in self.hosts:
            raise RequestRefused(421, f"this service is not '{host}'; it answers to {', '.join(sorted(self.hosts))}")

    def _check_origin(self, headers: Headers, *, needs_token: bool) -> None:
        """Refuse requests from pages of other origins, with or without a token. A browser sends no Origin when it loads
        an image, so on open paths Sec-Fetch-Site must also not name another site or port."""
        ours = {f"{scheme}://{headers['host'].lower()}" for scheme in ("http", "https")}
        if any(origin.lower() not in ours for origin in headers.getlist("origin")):
            raise RequestRefused(403, "pages of another origin may not call this service")
        site = headers.get("sec-fetch-site", "none")
        if site == "cross-site" or not (needs_token or site in ("same-origin", "none")):
            raise RequestRefused(403, "pages of another site may not call this service")

    def _check_token(self, headers: Headers, scope: Scope) -> None:
        if self.service.authenticate is not None:
            return self.service.authenticate(headers.get("authorization", ""), scope)
        if not hmac.compare_digest(headers.get("authorization", "").encode(), self.credential):
            raise RequestRefused(401, "send 'Authorization: Bearer TOKEN'; the token is in the service's token file")

    def _check_type(self, headers: Headers) -> None:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in self.service.body_types:
            known = " or ".join(sorted(self.service.body_types))
            raise RequestRefused(415, f"Content-Type must be {known}, not '{kind}'", field="content-type")
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding != "identity" and not (self.service.gzip and encoding == "gzip"):
            raise RequestRefused(
                415, "unsupported Content-Encoding; send the body uncompressed", field="content-encoding"
            )

    async def _whole_body(
        self, headers: Headers, scope: Scope, receive: Receive, grow: Callable[[int], Awaitable[None]], *, patient: bool
    ) -> bytes:
        """Read the whole body, up to the size limit, before anything parses it."""
        too_large = RequestRefused(413, f"the body is larger than {self.body_bytes} bytes")
        said = _said_bytes(headers, 0)
        if said > self.body_bytes:
            raise too_large
        await self._room_for(said, patient=patient)
        unseen = min(said or self.body_bytes, self.body_bytes, _AT_ONCE)  # may have arrived before it is passed on
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
    """Return the largest unpacked size. No real text has a higher ratio, so a small body may not take much memory."""
    return min(most, max(_AT_ONCE, _MAX_RATIO * packed_bytes))


def gunzip(body: bytes, most: int) -> bytes:
    most = _most_plain(len(body), most)
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(body, most + 1)
    except zlib.error as error:
        raise RequestRefused(422, f"the body is not gzip: {error}", field="content-encoding") from None
    if len(plain) > most:
        raise RequestRefused(413, f"the unpacked body is larger than {most} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise RequestRefused(422, "the body is not one complete gzip stream", field="content-encoding")
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


# --- metrics


class Meter:
    """Counts responses by route and status. Paths are not used as labels, because clients choose them. A request that
    the server's end cut off before its response began gets a 503."""

    def __init__(self, app: ASGIApp, *, registry: CollectorRegistry) -> None:
        self.app = app
        self.requests = Counter(
            "tandem_http_requests", "Responses sent.", ("method", "route", "status"), registry=registry
        )
        self.seconds = Histogram(
            "tandem_http_request_seconds", "From the request to the last byte of its response.", ("route",),
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
        except asyncio.CancelledError:  # by uvicorn, which would log it as an error; it closes open responses
            if not status:
                ended = RequestRefused(503, "the service is ending; send it again after its restart", close=True)
                await refusal(ended, scope)(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.requests.labels(method, route, str(status or 500)).inc()
            self.seconds.labels(route).observe(time.perf_counter() - started)


# --- for routes


def body_at_hand(request: Request) -> bytes:
    """Return the body without the copy that `await request.body()` makes."""
    return request.scope.get(_BODY, b"")


def let_go(request: Request) -> None:
    """Free a parsed body, so that other requests can use its memory while this one waits."""
    request._body = b""  # pyright: ignore[reportPrivateUsage] - where Starlette keeps it for a second reader
    request.scope[_BODY] = b""
    request.scope.get(_LET_GO, lambda: None)()


def aside(request: Request) -> OffLoop:
    """Return the runner for work of this request that may take long."""
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
