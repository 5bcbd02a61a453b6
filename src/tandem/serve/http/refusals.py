"""The form of error responses: one for all services, and OpenAI's form on OpenAI's paths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from tandem.errors import (
    Conflict,
    EngineError,
    Fenced,
    GroupRefused,
    KeyReused,
    NotKnown,
    QueueFull,
    Starved,
    StoreBroken,
    StoreFull,
    TandemError,
    TextTooLong,
)

CODES = {
    400: "bad_request", 401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    408: "too_slow", 409: "conflict", 413: "too_large", 415: "unsupported_type", 421: "misdirected", 422: "invalid",
    429: "busy",
    499: "client_gone", 500: "internal", 501: "not_installed", 503: "unavailable", 507: "full",
}  # fmt: skip

_STORE_STATUS: dict[type[TandemError], int] = {NotKnown: 404, QueueFull: 429, StoreFull: 507, StoreBroken: 503}

_STORE_CODES: dict[type[TandemError], str] = {Fenced: "fenced", KeyReused: "key_reused", Starved: "starved"}

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 507: {"Retry-After": "5"}}


class RequestRefused(TandemError):
    """A request is answered with an error; `field` names what to change in the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str = "",
        code: str = "",
        close: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        """`close`: also close the connection. `retry_after_s`: when to send it again; 0: as usual for the status."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status, self.message, self.field, self.close = status, message, field, close
        self.code = code or CODES[status]

    @property
    def body(self) -> dict[str, dict[str, Any]]:
        named = {"field": self.field} if self.field else {}
        return {"error": {"code": self.code, "message": self.message, **named}}

    @property
    def openai(self) -> tuple[int, dict[str, dict[str, Any]]]:
        """Status and body in OpenAI's form, where an invalid request is a 400."""
        kind = _OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = self.body["error"] | {"type": kind, "param": self.field or None}
        return 400 if self.status == 422 else self.status, {"error": error}


def as_refused(error: Exception) -> RequestRefused:
    """Return the response for any failure. An unexpected error's text is only logged, not sent to the client."""
    match error:
        case RequestRefused():
            return error
        case EngineError():
            return RequestRefused(503, str(error), code="engine")
        case GroupRefused(field=field, text=text):
            return RequestRefused(422, text, field=field)
        case NotKnown() | Conflict() | QueueFull() | StoreFull() | StoreBroken() | Starved():
            status, code = _STORE_STATUS.get(type(error), 409), _STORE_CODES.get(type(error), "")
            return RequestRefused(status, str(error), field=error.field, code=code)
        case TextTooLong():
            return RequestRefused(422, str(error), code="context_length_exceeded")
        case TandemError() if isinstance(error, ValueError):
            return RequestRefused(422, str(error))
        case HTTPException(status_code=status):
            return RequestRefused(status if status in CODES else 400, str(error.detail))
        case RequestValidationError():
            first = error.errors()[0]
            return RequestRefused(422, first["msg"], field=".".join(str(part) for part in first["loc"][1:]))
        case _:
            return RequestRefused(500, "the service failed; its log says why")


def speaks_openai(path: str) -> bool:
    """Return whether a path is one of OpenAI's, whose errors have another form."""
    return "/v1/" in path


def refusal(error: RequestRefused, scope: Scope, headers: Mapping[str, str] | None = None) -> JSONResponse:
    status, body = error.openai if speaks_openai(scope["path"]) else (error.status, error.body)
    closing = {"Connection": "close"} if error.close else {}
    again = {"Retry-After": str(math.ceil(error.retry_after_s))} if error.retry_after_s else {}
    return JSONResponse(body, status, {**_HEADERS.get(error.status, {}), **again, **closing, **(headers or {})})
