"""Deployments, and OpenAI's routes over them: each request is passed to one replica of one revision, unbuffered."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, cast

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from sqlalchemy.orm import Session
from starlette.types import Receive, Scope, Send

from tandem.control import deployments
from tandem.control.api.requests import Nothing, Plane, answer, caller_of, written_once
from tandem.control.callers import Caller
from tandem.control.deployments import Candidate
from tandem.control.replicas import Replica
from tandem.control.tables import Deployment
from tandem.serve.http.openapi_document import EVENTS, JSON, speaks
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.service import body_at_hand
from tandem.shapes.base import Asked
from tandem.shapes.deployments import DEPLOYMENT_HEADER, DeployBody, DeploymentInfo, DeploymentList, PromoteBody

WAIT_S = 30.0
"""How long a request waits for a replica."""
SESSION = "x-session-id"
"""Header of requests that the same revision should answer; without it OpenAI's field `user`."""
WAKE = "x-tandem-wake"
"""Header of requests: with "no", a revision that is asleep is not started, and the request gets 409."""
FEEDBACK = "/v1/feedback"
_POLL_S, _READ_S = 0.1, 600.0
_VERSION = re.compile(rb'"weight_version": ?(\d+)')


class DeploymentRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.router = APIRouter()
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(_READ_S, connect=2.0), limits=httpx.Limits(max_connections=None), trust_env=False
        )
        add = self.router.add_api_route
        add("/api/deployments", self.list, methods=["GET"])
        add("/api/deployments", self.deploy, methods=["POST"], status_code=201)
        add("/api/deployments/{id}", self.show, methods=["GET"])
        add("/api/deployments/{id}/promote", self.promote, methods=["POST"])
        add("/api/deployments/{id}/rollback", self.rollback, methods=["POST"])
        add("/api/deployments/{id}/undeploy", self.undeploy, methods=["POST"])
        add("/v1/models", self.models, methods=["GET"])
        add("/v1/chat/completions", self.chat, methods=["POST"])
        add("/v1/completions", self.complete, methods=["POST"])
        add("/v1/responses", self.respond, methods=["POST"])
        add("/v1/embeddings", self.embed, methods=["POST"])
        add(FEEDBACK, self.feedback, methods=["POST"])

    async def close(self) -> None:
        await self._http.aclose()

    @speaks(answer=DeploymentList, scope="deploy")
    async def list(self, request: Request) -> Response:
        """List deployments."""
        return answer(DeploymentList(items=await self._infos(request, "deploy")))

    @speaks(answer=DeploymentInfo, scope="deploy")
    async def show(self, id: str, request: Request) -> Response:
        """Return the deployment of a name."""
        caller, now = caller_of(request, "deploy"), self.plane.clock()
        return answer(
            await self.plane.store.read(lambda session: self._info(session, deployments.find(session, caller, id), now))
        )

    @speaks(DeployBody, key="required", status=201, answer=DeploymentInfo, scope="deploy")
    async def deploy(self, request: Request) -> Response:
        """Put a checkpoint of a run behind a name, as its next revision; or an online server, for the operator."""
        caller = caller_of(request, "deploy")

        def change(session: Session, body: DeployBody, now: int) -> DeploymentInfo:
            if body.online:
                if not caller.is_operator:
                    raise RequestRefused(403, "online: the operator alone puts an online server behind a name")
                if body.online not in self.plane.online:
                    why = f"online = '{body.online}': the file of targets has no [online.{body.online}]"
                    raise RequestRefused(422, why, field="online")
                made = deployments.deploy_online(session, caller, body, now)
                return self._info(session, session.get_one(Deployment, made), now)
            run = deployments.visible_run(session, caller, body.run)
            if body.target not in ("", run.target):
                raise RequestRefused(
                    422, f"target = '{body.target}': the weights of '{run.id}' are on '{run.target}'", field="target"
                )
            price = self.plane.prices.get(run.target)
            if price is None:
                raise RequestRefused(422, f"target = '{run.target}': this server has it no more", field="target")
            if self.plane.kinds.get(run.target, "local") != "local":
                raise RequestRefused(
                    422, f"target = '{run.target}': is on another machine, and a replica answers on its own machine "
                    "alone; fetch the run (`tandem pull`) and use `tandem serve` there", field="target",
                )  # fmt: skip
            made = deployments.deploy(session, caller, body, price, now)
            return self._info(session, session.get_one(Deployment, made), now)

        return JSONResponse(await written_once(self.plane, request, DeployBody, change), 201)

    @speaks(PromoteBody, key="required", answer=DeploymentInfo, scope="deploy")
    async def promote(self, id: str, request: Request) -> Response:
        """Give all requests of a name to one revision."""

        def change(session: Session, row: Deployment, body: PromoteBody, now: int) -> None:
            deployments.promote(session, row, body.revision, self.plane.replicas, now)

        return await self._changed(request, id, PromoteBody, change)

    @speaks(Nothing, optional=True, key="required", answer=DeploymentInfo, scope="deploy")
    async def rollback(self, id: str, request: Request) -> Response:
        """Undo the last promote."""

        def change(session: Session, row: Deployment, _: Asked, now: int) -> None:
            deployments.rollback(session, row, self.plane.replicas, now)

        return await self._changed(request, id, Nothing, change)

    @speaks(Nothing, optional=True, key="required", answer=DeploymentInfo, scope="deploy")
    async def undeploy(self, id: str, request: Request) -> Response:
        """Take a name away; its replicas answer what they have begun, and end."""
        caller = caller_of(request, "deploy")

        def change(session: Session, _: Nothing, now: int) -> DeploymentInfo:
            row = deployments.find(session, caller, id)
            told = self._info(session, row, now)
            deployments.undeploy(session, row, now)
            return told

        return JSONResponse(await written_once(self.plane, request, Nothing, change))

    async def _changed(
        self, request: Request, name: str, kind: type[Any], change: Callable[[Session, Deployment, Any, int], None]
    ) -> Response:
        caller = caller_of(request, "deploy")

        def made(session: Session, body: Any, now: int) -> DeploymentInfo:
            row = deployments.find(session, caller, name)
            change(session, row, body, now)
            return self._info(session, row, now)

        return JSONResponse(await written_once(self.plane, request, kind, made))

    def _info(self, session: Session, row: Deployment, now: int) -> DeploymentInfo:
        return deployments.info(session, row, self.plane.replicas, now)

    async def _infos(self, request: Request, scope: str) -> list[DeploymentInfo]:
        caller, now = caller_of(request, scope), self.plane.clock()
        return await self.plane.store.read(
            lambda session: [self._info(session, row, now) for row in deployments.listed(session, caller)]
        )

    # --- OpenAI's routes

    @speaks(scope="chat")
    async def models(self, request: Request) -> Response:
        """List the names that can be asked, and each `NAME@N`. `asleep`: a request may have to start a replica."""
        rows = list[dict[str, Any]]()
        for each in await self._infos(request, "chat"):
            asked = [revision for revision in each.revisions if revision.weight or revision.canary]
            names = {each.name: asked} | {f"{each.name}@{revision.n}": [revision] for revision in each.revisions}
            for name, of in names.items():
                row = {"id": name, "object": "model", "created": each.at // 1000, "owned_by": "tandem"}
                rows.append({**row, "asleep": any(revision.asleep for revision in of)})
        return JSONResponse({"object": "list", "data": rows})

    @speaks(dict[str, Any], answers=(JSON, EVENTS), scope="chat")
    async def chat(self, request: Request) -> Response:
        """Ask a deployment, as OpenAI's chat completions."""
        return await self._pass_on(request, "/v1/chat/completions")

    @speaks(dict[str, Any], answers=(JSON, EVENTS), scope="chat")
    async def complete(self, request: Request) -> Response:
        """Ask a deployment, as OpenAI's completions."""
        return await self._pass_on(request, "/v1/completions")

    @speaks(dict[str, Any], answers=(JSON, EVENTS), scope="chat")
    async def respond(self, request: Request) -> Response:
        """Ask a deployment, as OpenAI's responses."""
        return await self._pass_on(request, "/v1/responses")

    @speaks(dict[str, Any], scope="chat")
    async def embed(self, request: Request) -> Response:
        """Refused by the replica, in words."""
        return await self._pass_on(request, "/v1/embeddings")

    @speaks(dict[str, Any], scope="chat")
    async def feedback(self, request: Request) -> Response:
        """Rate an answer by its id, as `tandem serve --feedback` does."""
        caller, body = caller_of(request, "chat"), _json_object(request)
        answer_id = body.get("id")
        name = answer_id.partition(".")[2] if isinstance(answer_id, str) else ""
        if not name:
            raise RequestRefused(422, "id: write the id of a chat completion of a deployment", field="id")
        found = await self.plane.store.read(lambda session: deployments.candidates(session, caller, name))
        if found and found[0].online:
            return await self._ask_online(name, found[0].online, FEEDBACK, body)
        passed, choice = await self._reach(caller, name, "", FEEDBACK, body)
        content = await passed.whole()
        if passed.status_code == 200:
            told = json.loads(content)
            rated, now = f"{answer_id} {told['choice']}"[:200], self.plane.clock()
            await self.plane.store.write(
                lambda session: deployments.rate(session, choice, rated, float(told["value"]), now)
            )
        return Response(content, passed.status_code, media_type="application/json")

    async def _ask_online(self, plain: str, server: str, path: str, body: dict[str, Any]) -> Response:
        """Send a request to an online server. Its answer says which version made it: the header X-Tandem-Version."""
        at = self.plane.online.get(server)
        if at is None:
            raise RequestRefused(503, f"'{plain}': this server has no [online.{server}] any more", retry_after_s=60.0)
        sent = body if path == FEEDBACK else {**body, "model": at.model}
        replica = Replica(f"online {server}", "", at.url, self.plane.clock(), {})
        headers = {"Authorization": f"Bearer {at.token}", DEPLOYMENT_HEADER: plain}
        passed = await self._ask(path, sent, replica, None, headers)
        if passed is None:
            raise RequestRefused(503, f"'{plain}': its online server does not answer now; ask again", retry_after_s=5.0)
        if passed.status_code in (401, 403, 421):  # of this server's token and address, not of the caller's
            await passed.whole()
            why = f"'{plain}': its online server refuses this server ({passed.status_code}); tell the operator to look"
            raise RequestRefused(503, f"{why} at [online.{server}] in the file of targets")
        return await passed.with_version(plain)

    async def _pass_on(self, request: Request, path: str) -> Response:
        caller, body = caller_of(request, "chat"), _json_object(request)
        name = body.get("model")
        if not isinstance(name, str):
            raise RequestRefused(422, "model: write the name of a deployment", field="model")
        session_id = request.headers.get(SESSION) or str(body.get("user") or "")
        may_wake = request.headers.get(WAKE) != "no"
        found = await self.plane.store.read(lambda session: deployments.candidates(session, caller, name))
        if found and found[0].online:
            return await self._ask_online(name, found[0].online, path, body)
        passed, _ = await self._reach(caller, name, session_id, path, body, may_wake=may_wake)
        return passed

    async def _reach(
        self, caller: Caller, name: str, session_id: str, path: str, body: dict[str, Any], *, may_wake: bool = True
    ) -> tuple[_Passed, Candidate]:
        """Send a request to a replica of one of the name's revisions, and wait for one if there is none now."""
        plain, began, counts = name.partition("@")[0], time.monotonic(), path != FEEDBACK
        while True:
            found = await self.plane.store.read(lambda session: deployments.candidates(session, caller, name))
            choice = pick(found, session_id, lambda each: self._find(each) is not None)
            replica, revision = self._find(choice), f"{plain}@{choice.n}"
            if replica is not None:
                sent = {**body, "model": revision} if counts else body
                tally = self._tally(choice) if counts else None
                if (told := await self._ask(path, sent, replica, tally)) is not None:
                    told.headers["X-Tandem-Revision"] = revision
                    return told, choice
            elif choice.asleep and not may_wake:
                raise RequestRefused(409, f"'{revision}' is asleep, and the request says not to start it")
            elif choice.asleep:
                self.plane.replicas.waked(choice.replica)
                await self.plane.store.write(partial(deployments.wake, choice=choice, now=self.plane.clock()))
                self.plane.wake()
            elif choice.ended:
                why = f"'{revision}' has failed or was ended; `tandem deployments {plain}` says why"
                raise RequestRefused(503, why)
            if time.monotonic() - began > WAIT_S:
                if counts and self.plane.replicas.has_answered(choice.replica):
                    self._tally(choice)(0.0, failed=True)
                raise RequestRefused(503, f"'{revision}' does not answer now; ask again", retry_after_s=5.0)
            await asyncio.sleep(_POLL_S)

    def _find(self, choice: Candidate) -> Replica | None:
        return self.plane.replicas.find(choice.replica, self.plane.clock(), choice.weights)

    def _tally(self, choice: Candidate) -> Tally:
        return partial(self.plane.replicas.count, choice.deployment, choice.n)

    async def _ask(
        self, path: str, body: dict[str, Any], replica: Replica, tally: Tally | None,
        headers: Mapping[str, str] | None = None,
    ) -> _Passed | None:  # fmt: skip
        """Send it to a replica; return its answer, not read yet. None if it never reached it. `headers`: default: the
        token of the replica's attempt."""
        headers = headers or {"Authorization": f"Bearer {self.plane.callers.serve_token(replica.attempt)}"}
        began = time.monotonic()
        with ExitStack() as under_way:
            under_way.enter_context(self.plane.replicas.asked(replica.run))
            asked_for = self._http.build_request("POST", f"{replica.url}{path}", json=body, headers=headers)
            try:
                try:
                    told = await self._http.send(asked_for, stream=True)
                except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
                    # A kept connection can be closed in the moment in which it is taken: once more, on another one.
                    try:
                        told = await self._http.send(asked_for, stream=True)
                    except httpx.ConnectError:
                        raise error from None
            except (httpx.ConnectError, httpx.ConnectTimeout):
                self.plane.replicas.lost(replica)
                return None
            except httpx.TransportError as error:
                if tally is not None:
                    tally(0.0, failed=True)
                raise RequestRefused(
                    503, f"the replica ended while it answered ({type(error).__name__}); ask again", retry_after_s=1.0
                ) from None
            return _Passed(told, under_way.pop_all(), began, tally)


class Tally(Protocol):
    """Counts an answer of a revision."""

    def __call__(self, seconds: float, *, failed: bool) -> None: ...


class _Passed(StreamingResponse):
    """A replica's answer, as it comes. `under_way` ends with its last byte, or when the client has gone."""

    KEPT = ("content-type", "content-length", "content-encoding", "retry-after", "cache-control", "x-accel-buffering")

    def __init__(self, told: httpx.Response, under_way: ExitStack, began: float, tally: Tally | None) -> None:
        headers = {name: told.headers[name] for name in self.KEPT if name in told.headers}
        super().__init__(self._pieces(), told.status_code, headers)
        self._told, self._under_way, self._began, self._tally = told, under_way, began, tally
        self._raw = told.aiter_raw()
        self._first = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._under_way:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self._told.aclose()

    async def with_version(self, revision: str) -> Response:
        """Return the answer with headers for its revision and version. A stream's version is in its first piece."""
        response: Response = self
        if self._told.headers.get("content-type", "").startswith("application/json"):
            headers = {name: self.headers[name] for name in ("retry-after",) if name in self.headers}
            content = await self.whole()
            response = Response(content, self.status_code, headers, "application/json")
        else:
            try:
                self._first = content = await anext(self._raw, b"")
            except BaseException as error:  # also a client that has gone
                with self._under_way:
                    await self._told.aclose()
                if not isinstance(error, httpx.TransportError):
                    raise
                raise RequestRefused(503, "the online server ended while it answered", retry_after_s=1.0) from None
        if found := _VERSION.search(content):
            response.headers["X-Tandem-Version"] = found[1].decode()
        response.headers["X-Tandem-Revision"] = revision
        return response

    async def whole(self) -> bytes:
        with self._under_way:
            try:
                return await self._told.aread()
            except httpx.TransportError:
                raise RequestRefused(503, "the replica ended while it answered", retry_after_s=1.0) from None
            finally:
                await self._told.aclose()

    async def _pieces(self) -> AsyncIterator[bytes]:
        failed = self._told.status_code >= 500
        try:
            if self._first:
                yield self._first
            async for piece in self._raw:
                failed = failed or b'data: {"error"' in piece
                yield piece
        except httpx.TransportError:
            self._count(failed=True)
            raise
        self._count(failed=failed)

    def _count(self, *, failed: bool) -> None:
        if self._tally is not None:
            self._tally(time.monotonic() - self._began, failed=failed)


def _json_object(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(body_at_hand(request))
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RequestRefused(422, "body: write a JSON object", field="body")
    return cast("dict[str, Any]", body)


def pick(found: Sequence[Candidate], session_id: str, is_ready: Callable[[Candidate], bool]) -> Candidate:
    """Return a revision by weight, the same one for the same session. One that does not answer is left out, if another
    does."""
    able = [each for each in found if each.asleep or is_ready(each)]
    waiting = [each for each in found if each.weight and not each.ended]
    weighted = [each for each in able if each.weight] or waiting or [each for each in found if each.weight]
    if not weighted:
        raise RequestRefused(503, "no revision of this name has a weight; promote one", retry_after_s=5.0)
    if session_id:
        at = int.from_bytes(hashlib.sha256(session_id.encode()).digest()[:8], "big") / 2**64
    else:
        at = random.random()
    for each in able:
        if at < each.canary:
            return each
        at = (at - each.canary) / (1 - each.canary)
    at *= sum(each.weight for each in weighted)
    for each in weighted:
        at -= each.weight
        if at < 0:
            return each
    return weighted[-1]
