"""What all routes of the control plane share: who calls, bodies, idempotency keys, answers."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from sqlalchemy.orm import Session
from starlette.types import Scope

from tandem.control import queries
from tandem.control.audit import AuditLog
from tandem.control.callers import AgentCaller, Caller, Callers
from tandem.control.mirror import Mirror
from tandem.control.once import once
from tandem.control.openid import OpenIdProvider
from tandem.control.packages import Shelf
from tandem.control.rates import RateLimit
from tandem.control.replicas import OnlineServer, Replicas
from tandem.control.sealing import MasterKeys
from tandem.control.store import Store
from tandem.io.request_key import RequestKey
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.request_bounds import AT_ONCE_BYTES, check_values, idempotency_key
from tandem.serve.http.service import aside, body_at_hand, let_go
from tandem.shapes.base import Asked
from tandem.shapes.plans import PlanBody, PlanInfo
from tandem.shapes.runs import RunInfo, TargetInfo
from tandem.spec.load import plain_message

_CALLER = "tandem.caller"
_INDEX = re.compile(r"(/api/attempts/[^/]*)?/simple/")

Body = TypeVar("Body", bound=Asked)


class Nothing(Asked):
    """A body without fields."""


@dataclass(frozen=True)
class Plane:
    """What the routes work on."""

    store: Store
    mirror: Mirror
    callers: Callers
    keys: MasterKeys
    """Seal the secrets."""
    audit: AuditLog
    clock: Callable[[], int]
    prices: Mapping[str, float]
    """US dollars for an hour, by target."""
    offers: Callable[[], Awaitable[Sequence[TargetInfo]]]
    """Asks every target what it offers now."""
    plan: Callable[[PlanBody, TargetInfo], Awaitable[PlanInfo]]
    """Plans a spec for what a target offers."""
    wake: Callable[[], None]
    """Called when a run has changed, so that the loop looks at once."""
    shelf: Shelf
    """The files of packages of environments."""
    release: str = ""
    """This Tandem's version."""
    replicas: Replicas = field(default_factory=Replicas)
    """Where the replicas of deployments answer."""
    online: Mapping[str, OnlineServer] = field(default_factory=dict[str, OnlineServer])
    """The online servers that the operator has named."""
    openid: OpenIdProvider | None = None
    """Where people sign in; None: with keys only."""
    kinds: Mapping[str, str] = field(default_factory=dict[str, str])
    """By target: the kind of its provider."""

    def with_progress(self, info: RunInfo) -> RunInfo:
        """Return the run with what its mirrored files say of its progress. Call it on a thread."""
        status, progress = (self.mirror.small(info.id, file) for file in ("status.json", "progress.json"))
        return queries.with_progress(info, status, progress)


def authenticate(callers: Callers, rate: RateLimit, authorization: str, scope: Scope) -> None:
    """Put the caller into the request's scope; 401 if it is not known, 429 if it sends too much. Agents and keys have
    paths of their own. The operator may send as much as it likes."""
    if _INDEX.match(scope["path"]):
        authorization = _as_bearer(authorization)
    caller = callers.find(authorization)
    of_agents = scope["path"].startswith("/api/attempts/")
    if caller is None or isinstance(caller, AgentCaller) is not of_agents:
        why = "it was revoked or has expired, or there is none (Authorization: Bearer KEY); log in again"
        raise RequestRefused(401, f"your key is not valid here: {why}")
    if scope["path"] == "/metrics" and not (isinstance(caller, Caller) and caller.is_operator):
        raise RequestRefused(403, "the metrics are the operator's: use the token in the data directory")
    if not (isinstance(caller, Caller) and caller.is_operator):
        wait_s = rate.take(caller.attempt if isinstance(caller, AgentCaller) else caller.key)
        if wait_s:
            raise RequestRefused(
                429, f"this key sends more than {rate.per_s:g} requests a second; send it again after {wait_s:.1f} s",
                retry_after_s=wait_s,
            )  # fmt: skip
    scope[_CALLER] = caller


def _as_bearer(authorization: str) -> str:
    """Return the header of a key that pip or uv sent as the password of basic authentication."""
    scheme, _, told = authorization.partition(" ")
    if scheme != "Basic":
        return authorization
    try:
        return f"Bearer {base64.b64decode(told, validate=True).decode('ascii').partition(':')[2]}"
    except ValueError:
        return ""


def caller_of(request: Request, scope_name: str = "") -> Caller:
    """Return who calls. 403 if its key has not this scope."""
    caller: Caller = request.scope[_CALLER]
    if scope_name and scope_name not in caller.scopes:
        raise RequestRefused(403, f"this key has not the scope '{scope_name}'; use one that has it")
    return caller


def attempt_of(request: Request, attempt_id: str) -> str:
    """Return the attempt that the caller speaks for. 404 if the path names another."""
    caller: AgentCaller = request.scope[_CALLER]
    if caller.attempt != attempt_id:
        raise RequestRefused(404, f"there is no attempt '{attempt_id:.40}' for this token")
    return caller.attempt


async def asked(request: Request, kind: type[Body], *, keep: bool = False) -> Body:
    """Return the body, checked; large ones are parsed off the event loop. `keep`: it will be read again."""
    body = body_at_hand(request)
    read = partial(_parsed, body or b"{}", kind)
    found = await aside(request)(read) if len(body) > AT_ONCE_BYTES else read()
    if not keep:
        let_go(request)
    return found


def _parsed(body: bytes, kind: type[Body]) -> Body:
    check_values(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise RequestRefused(422, f"{field or 'body'}: {plain_message(first)}", field=field) from None


async def written_once(
    plane: Plane,
    request: Request,
    kind: type[Body],
    change: Callable[[Session, Body, int], BaseModel],
    *,
    secret: bool = False,
) -> dict[str, Any]:
    """Make a change of the database for this request's body and idempotency key; return its answer. `secret`: the body
    holds one, so that the database must not get a plain digest of it."""
    caller = caller_of(request)
    key = idempotency_key(request)
    content = f"{request.method} {request.url.path}\n".encode() + body_at_hand(request)
    digest = plane.keys.digest(content) if secret else hashlib.sha256(content).digest()
    body = await asked(request, kind)
    now = plane.clock()

    def write(session: Session) -> dict[str, Any]:
        def made(session: Session) -> dict[str, Any]:
            told = change(session, body, now).model_dump(mode="json")
            note(plane, session, request, caller.org, caller.key, told, now)
            return told

        return once(session, caller.key, RequestKey(key, digest), now, made)

    answer = await plane.store.write(write)
    plane.wake()
    return answer


def note(
    plane: Plane, session: Session, request: Request, org: str, actor: str, told: Mapping[str, Any], now: int
) -> None:
    """Write into the audit log that this request was done."""
    item = str(told.get("id") or request.path_params.get("id", ""))
    action = f"{request.method} {request.scope['route'].path}"
    plane.audit.add(session, now, org=org, actor=actor, action=action, item=item, told=told)


def answer(model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(model.model_dump_json(), status, headers, media_type="application/json")
