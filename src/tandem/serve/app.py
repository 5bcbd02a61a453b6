"""What every Tandem service shares: who may come in, what a refusal looks like, and the books it keeps open.

At the door, in this order: Host, Origin, token, type and size of the body. A route sees nothing that failed one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.errors import (
    Conflict,
    EngineError,
    GroupRefused,
    NotKnown,
    QueueFull,
    StoreBroken,
    StoreFull,
    TandemError,
)

_log = logging.getLogger(__name__)

BODY_BYTES = 16 * 2**20
_CLOSE_S = 3.0

_CODES = {
    400: "bad_request", 401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    409: "conflict", 413: "too_large", 415: "unsupported_type", 421: "misdirected", 422: "invalid", 429: "busy",
    499: "client_gone", 500: "internal", 503: "unavailable", 507: "full",
}  # fmt: skip

_STORE_STATUS: dict[type[TandemError], int] = {NotKnown: 404, QueueFull: 429, StoreFull: 507, StoreBroken: 503}

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

T = TypeVar("T")


class Refused(TandemError):
    """A request that is answered with an error; `field` names what to change in it."""

    def __init__(self, status: int, message: str, *, field: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.code = code or _CODES[status]

    @property
    def body(self) -> dict[str, dict[str, str]]:
        named = {"field": self.field} if self.field else {}
        return {"error": {"code": self.code, "message": self.message, **named}}


@dataclass(frozen=True)
class Service:
    """What one service brings to the app: its routes, numbers for /limits and /metrics, and what ends with it."""

    name: str
    router: APIRouter
    limits: Mapping[str, int] = field(default_factory=dict[str, int])
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    close: Callable[[], Awaitable[None]] | None = None
    why_unfit: Callable[[], str] = lambda: ""
    """Why it cannot answer, for /health; empty if it can."""
    start: Callable[[], Awaitable[None]] | None = None
    """Before the first request, on the event loop."""


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

    app = FastAPI(title=service.name, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    registry = CollectorRegistry()

    @app.get("/health")
    async def health() -> JSONResponse:
        why = service.why_unfit()
        return JSONResponse({"status": why}, 503) if why else JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = generate_latest(registry) + generate_latest(service.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/limits")
    async def limits() -> JSONResponse:
        return JSONResponse({"body_bytes": body_bytes, **service.limits})

    app.include_router(service.router)
    app.add_exception_handler(Refused, _answer)
    app.add_exception_handler(TandemError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(RequestValidationError, _answer)
    app.add_exception_handler(Exception, _answer)
    app.add_middleware(Gate, token=token, hosts=hosts, body_bytes=body_bytes)
    app.add_middleware(Meter, registry=registry)  # added last, so outermost: refusals at the gate are counted too
    return app


# --- refusals


def as_refused(error: Exception) -> Refused:
    """Any failure as the client is told about it. What we did not foresee keeps its text to itself (the log has it)."""
    match error:
        case Refused():
            return error
        case EngineError():
            return Refused(503, str(error), code="engine")
        case GroupRefused(field=field, text=text):
            return Refused(422, text, field=field)
        case NotKnown() | Conflict() | QueueFull() | StoreFull() | StoreBroken():
            return Refused(_STORE_STATUS.get(type(error), 409), str(error))
        case TandemError() if isinstance(error, ValueError):
            return Refused(422, str(error))
        case HTTPException(status_code=status):
            return Refused(status if status in _CODES else 400, str(error.detail))
        case RequestValidationError():
            first = error.errors()[0]
            return Refused(422, first["msg"], field=".".join(str(part) for part in first["loc"][1:]))
        case _:
            return Refused(500, "the service failed; its log says why")


def refusal(error: Refused) -> JSONResponse:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(error.status)
    return JSONResponse(error.body, error.status, headers)


async def _answer(request: Request, error: Exception) -> Response:
    refused = as_refused(error)
    if refused.status >= 500:
        _log.error("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error)
    return refusal(refused)


# --- the door


class Gate:
    def __init__(self, app: ASGIApp, *, token: str, hosts: frozenset[str] | None, body_bytes: int) -> None:
        self.app, self.hosts, self.body_bytes = app, hosts, body_bytes
        self.credential = b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        assert scope["type"] == "http", "websockets are off: they would pass by these checks"
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            self._check_origin(headers)
            if scope["path"] != "/health":
                self._check_token(headers)
            if _has_body(headers):
                _check_type(headers)
                receive = await self._whole_body(headers, receive)
        except Refused as error:
            return await refusal(error)(scope, receive, send)
        await self.app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """A name that is not ours comes from a browser whose DNS was rebound to this address."""
        named = headers.getlist("host")
        if len(named) != 1:
            raise Refused(421, "the request must carry one Host header")
        name, _, port = named[0].lower().rpartition(":")
        host = name if name and port.isdigit() else named[0].lower()
        if self.hosts is not None and host not in self.hosts:
            raise Refused(421, f"this service is not '{host}'; it answers to {', '.join(sorted(self.hosts))}")

    def _check_origin(self, headers: Headers) -> None:
        """Browsers send Origin; a page from elsewhere has no business here, token or not."""
        ours = {f"{scheme}://{headers['host'].lower()}" for scheme in ("http", "https")}
        if any(origin.lower() not in ours for origin in headers.getlist("origin")):
            raise Refused(403, "pages of another origin may not call this service")
        if headers.get("sec-fetch-site") == "cross-site":
            raise Refused(403, "pages of another site may not call this service")

    def _check_token(self, headers: Headers) -> None:
        if not hmac.compare_digest(headers.get("authorization", "").encode(), self.credential):
            raise Refused(401, "send 'Authorization: Bearer TOKEN'; the token is in the service's token file")

    async def _whole_body(self, headers: Headers, receive: Receive) -> Receive:
        """Reads the body up to the cap, before anything parses it, and plays it back."""
        too_large = Refused(413, f"the body is larger than {self.body_bytes} bytes")
        if int(headers.get("content-length", "0")) > self.body_bytes:
            raise too_large
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(499, "the client hung up")
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.body_bytes:
                raise too_large
        waiting: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        return replay


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _check_type(headers: Headers) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"Content-Type must be application/json, not '{kind}'", field="content-type")
    if headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "compressed bodies are not taken; send it plain", field="content-encoding")


# --- the books


class Meter:
    """Counts every answer by route (never by path: its cardinality would be the client's to choose) and status."""

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
        started, status = time.perf_counter(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.requests.labels(method, route, str(status)).inc()
            self.seconds.labels(route).observe(time.perf_counter() - started)


# --- for routes


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Does the work; a client that hangs up ends it, so that nothing is computed for nobody."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "the client hung up")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
