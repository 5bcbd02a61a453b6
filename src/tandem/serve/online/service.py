"""The routes of an online server: OpenAI's, and those to train the model, watch it and roll it back.

POST /train                       train on samples, or on a session and its reward; the job is on the disk at the 202
GET  /train/status                the served version, the running job, the trainer's health; never waits for the trainer
GET  /train/jobs  /train/jobs/{id}         jobs, with the outcome of every gate
POST /train/jobs/{id}/cancel      cancel a job that is not published yet
GET  /train/events  /train/jobs/{id}/events    server-sent events
POST /checkpoint                  save master weights and optimizer state; on the disk when this answers
GET  /versions  /versions/served  the published versions; a digest of the engine's weights, computed now
GET  /versions/{v}/provenance     the samples of a version, their sender, its gates
POST /versions/{v}/v1/...         OpenAI's routes over an earlier version, beside the active one
POST /versions/{v}/activate       serve this version: a rollback, or forward again
POST /feedback                    rate an answer, for the watched metric
POST /v1/feedback                 a thumb, or a number, for a chat completion by its id; the metric `thumb`
POST /sessions                    open a named conversation; every answer names its session
GET  /audit                       the audit log
GET  /                            a page that shows these and compares two versions; it asks for the token

Every write needs an Idempotency-Key; POST /train may leave it out. serve/online/keys.py says which key may use a route.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any, Protocol
from weakref import WeakValueDictionary

import msgspec
from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import Gauge
from pydantic import Field
from pydantic_core import to_json

from tandem.errors import EngineError
from tandem.io.chat_feedback import ChatStore
from tandem.io.finish_anyway import to_its_end
from tandem.io.request_key import RequestKey
from tandem.online.events import Event
from tandem.online.job_store import ENDED
from tandem.online.orchestrator import Orchestrator
from tandem.rollout.recorder import RecorderRenderer
from tandem.rollout.sessions.sessions import Sessions
from tandem.rollout.sessions.store import SessionStore
from tandem.serve.gateway import Recorded, Recording
from tandem.serve.http.openapi_document import EVENTS, JSON, speaks
from tandem.serve.http.pages import page
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.request_bounds import AT_ONCE_BYTES, idempotency_key
from tandem.serve.http.service import Service, aside, body_at_hand
from tandem.serve.online.keys import WHO
from tandem.serve.online.past_versions import PastVersions
from tandem.serve.online.train_requests import (
    Lesson,
    SampleRequirements,
    TrainBody,
    check_rank,
    lesson,
    lesson_of_session,
)
from tandem.serve.openai.feedback_route import feedback_router
from tandem.serve.openai.requests import ChatRequest, CompletionRequest, checked, read, read_if_any
from tandem.serve.openai.routes import OpenAi, Stateless
from tandem.serve.openai.service import openai_router
from tandem.serve.openai.strict import Strict

_LESSON_S = 120.0  # a job may have a million tokens
_MOST, _NO_BOUND = 1000, 10**18 - 1
_NO_CHOICE = frozenset[str]()
Number = Annotated[int, Path(ge=0, lt=2**53)]
_ON_UPDATE = {name: frozenset({"follow", "pin", "restart"}) for name in ("continue", "restart")}
"""Of the embedded engine. With `finish` no request is in flight at a flip; vLLM has one setting for all requests."""


class OnlineRenderer(Recording, RecorderRenderer, Protocol):
    """The renderer methods that an online server uses: for requests, sessions and recordings."""


def online_service(
    conductor: Orchestrator,
    renderer: OnlineRenderer,
    kept: SessionStore,
    past: PastVersions,
    *,
    model_id: str,
    context: int,
    num_ids: int,
    chats: ChatStore | None = None,
) -> Service:
    """Build the service. `context`: most tokens of prompt and completion together. `num_ids`: size of the
    vocabulary. `chats`: keeps chats for feedback."""
    renderer = renderer.within(context)
    embedded = conductor.spec.engine.kind == "server"
    on_update = _ON_UPDATE.get(conductor.spec.engine.on_update, _NO_CHOICE) if embedded else _NO_CHOICE
    sessions = Sessions(renderer, kept)
    openai = OpenAi(conductor.engine, renderer, Recorded(sessions), model_id, context, num_ids, on_update=on_update,
                    chats=chats)  # fmt: skip
    api, router = _OnlineApi(conductor, SampleRequirements(renderer, context, num_ids), sessions), APIRouter()
    for prefix in ("/v1", "/sessions/{session}/v1"):
        router.include_router(openai_router(openai, prefix))
    router.include_router(feedback_router(chats, partial(conductor.feedback, "thumb")))

    async def of_past(version: Number) -> OpenAi:
        conductor.store.version(version)
        return OpenAi(await past.engine(version), renderer, Stateless(renderer), model_id, context, num_ids)

    @speaks(ChatRequest, answers=(JSON, EVENTS))
    async def chat(version: Number, request: Request) -> Response:
        return await (await of_past(version)).chat(request)

    @speaks(CompletionRequest, answers=(JSON, EVENTS))
    async def complete(version: Number, request: Request) -> Response:
        return await (await of_past(version)).complete(request)

    router.add_api_route("/versions/{version}/v1/chat/completions", chat, methods=["POST"])
    router.add_api_route("/versions/{version}/v1/completions", complete, methods=["POST"])
    router.add_api_route("/", page("online.html"), methods=["GET"])

    async def start() -> None:
        for session in kept.open_sessions(sessions.now()):
            sessions.take_back(session)
        await conductor.start()

    async def close() -> None:
        await past.close()
        await conductor.close()
        kept.close()
        if chats is not None:
            chats.close()

    gets = {
        "/train/status": api.status, "/train/jobs": api.jobs, "/train/jobs/{id}": api.job, "/train/events": api.events,
        "/train/jobs/{id}/events": api.events, "/versions": api.versions, "/versions/served": api.served,
        "/versions/{version}/provenance": api.provenance, "/audit": api.audit,
    }  # fmt: skip
    posts = {
        "/train": api.train,
        "/feedback": api.feedback,
        "/sessions": api.open, "/train/jobs/{id}/cancel": api.cancel, "/checkpoint": api.checkpoint,
        "/versions/{version}/activate": api.activate,
    }  # fmt: skip
    for path, answer in gets.items():
        router.add_api_route(path, answer, methods=["GET"])
    for path, answer in posts.items():
        router.add_api_route(path, answer, methods=["POST"])
    registry = openai.books.registry
    active = Gauge("tandem_online_active_version", "The version that is served.", registry=registry)
    active.set_function(lambda: conductor.serving)
    teach = conductor.spec.train
    limits = {"samples_per_job": teach.max_samples, "steps_per_job": teach.max_steps}
    return Service(
        "tandem online serve",
        router,
        limits={**openai.limits, **limits},
        registry=registry,
        ending=conductor.events.end,
        close=close,
        why_unfit=conductor.why_unfit,
        start=start,
        open_paths=frozenset({"/"}),
    )


class FeedbackBody(Strict):
    metric: str = Field(min_length=1, max_length=128)
    version: int = Field(ge=0)
    """The version that made the answer: its `weight_version`."""
    value: float


class ActivateBody(Strict):
    why: str = ""


class _SamplesOnly(msgspec.Struct):
    samples: msgspec.Raw


class EmptyBody(Strict):
    """An empty body: unknown fields are refused here, too."""


class _OnlineApi:
    def __init__(self, conductor: Orchestrator, model: SampleRequirements, sessions: Sessions) -> None:
        self.conductor, self.store, self.model, self.sessions = conductor, conductor.store, model, sessions
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    # --- teaching

    @speaks(TrainBody, status=202, key="optional")
    async def train(self, request: Request) -> Response:
        once = await _once(request, needed=False)
        if (reply := self.store.answered(once)) is not None:
            return JSONResponse(reply, 202)
        body = await read(request, partial(checked, TrainBody))
        check_rank(body, self.conductor.spec)
        if body.session is not None:
            async with self._turns.setdefault(once.key, asyncio.Lock()):
                if (reply := self.store.answered(once)) is None:
                    reply = await to_its_end(self._train_session(request, body, once))
            return JSONResponse(reply, 202)

        raw = body_at_hand(request)

        def learn() -> tuple[Lesson, bytes]:
            said = bytes(
                msgspec.json.decode(raw, type=_SamplesOnly).samples
            )  # as it was sent; encoding it again would take longer
            return lesson(body, self.conductor.spec.train, self.model), said

        taught, said = await aside(request)(learn, deadline_s=_LESSON_S)
        reply = await self.store.add(
            taught.groups, taught.teaching, who=_who(request), source=body.source, said=said, once=once
        )
        self.conductor.wake()
        return JSONResponse(reply, 202)

    async def _train_session(self, request: Request, body: TrainBody, once: RequestKey) -> Mapping[str, Any]:
        """Train on a session once, even if it is rewarded again meanwhile."""
        assert body.session is not None
        assert body.reward is not None
        session = self.sessions.find(body.session)
        rewards = self.sessions.judge(session, body.reward, {})
        trajectories = [each for _, each in self.sessions.trajectories(session, rewards)]
        taught = lesson_of_session(body, trajectories, self.conductor.spec.train)
        said = to_json([{"messages": [dict(message) for message in each.messages]} for each in trajectories])
        session.finishing = True
        try:
            reply = await self.store.add(
                taught.groups, taught.teaching, who=_who(request), source=body.source, said=said, once=once
            )
        except BaseException:
            session.finishing = False
            raise
        for each in trajectories:
            self.conductor.feedback("reward", max(each.versions), each.reward)
        self.sessions.drop(session)
        self.conductor.wake()
        return reply

    @speaks(FeedbackBody, key="required")
    async def feedback(self, request: Request) -> Response:
        body = await read(request, partial(checked, FeedbackBody))

        async def take() -> Mapping[str, Any]:
            return {"watched": self.conductor.feedback(body.metric, body.version, body.value)}

        return await self._repeatable(request, take)

    @speaks(EmptyBody, optional=True, key="required")
    async def open(self, request: Request) -> Response:
        async def open() -> Mapping[str, Any]:
            session = self.sessions.new(group="", group_size=0, task_id="")
            self.sessions.open(session)
            return {"id": session.id, "base_url": f"{request.base_url}sessions/{session.id}/v1"}

        await read_if_any(EmptyBody, request)
        return await self._repeatable(request, open)

    async def status(self) -> Response:
        return JSONResponse(self.conductor.status())

    @speaks(query=("most",))
    async def jobs(self, request: Request) -> Response:
        return JSONResponse({"jobs": [job.row() for job in self.store.jobs(_most(request, 20))]})

    async def job(self, id: str) -> Response:
        return JSONResponse(self.store.job(id).row())

    @speaks(EmptyBody, optional=True, key="required")
    async def cancel(self, id: str, request: Request) -> Response:
        await read_if_any(EmptyBody, request)
        return await self._repeatable(request, lambda: self.conductor.cancel(id, _who(request)))

    @speaks(answers=(EVENTS,))
    async def events(self, request: Request, id: str = "") -> Response:
        if id:
            self.store.job(id)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._told(id), media_type="text/event-stream", headers=headers)

    async def _told(self, id: str) -> AsyncIterator[str]:
        listening = self.conductor.events.listen()
        if id and (job := self.store.job(id)).state in ENDED:
            yield _sse(Event(0, "job", {"id": id, "state": job.state, "version": job.version, "why": job.why}))
            return
        async for event in listening:
            if id and event.data.get("id") != id:
                continue
            yield _sse(event)
            if id and event.ended:
                return

    # --- versions

    @speaks(EmptyBody, optional=True, key="required")
    async def checkpoint(self, request: Request) -> Response:
        await read_if_any(EmptyBody, request)
        return await self._repeatable(request, self.conductor.checkpoint)

    @speaks(query=("most", "before"))
    async def versions(self, request: Request) -> Response:
        active, rows = self.store.active, self.store.versions(_most(request, 100), _asked(request, "before", _NO_BOUND))
        return JSONResponse({"active": active, "serving": self.conductor.serving, "versions": rows})

    async def served(self) -> Response:
        """Digest the served weights. The version is read before and after, and again if a flip came in between."""
        engine = self.conductor.engine
        for _ in range(10):
            version = engine.version
            prints = await engine.fingerprints()
            if engine.version == version:
                text = "\n".join(f"{name} {each}" for name, each in sorted(prints.items()))
                digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
                return JSONResponse({"version": version, "digest": digest, "tensors": len(prints)})
        raise EngineError("the weights changed during every attempt; send the request again")

    async def provenance(self, version: Number) -> Response:
        row = self.store.version(version)
        if row["job"] is None:
            return JSONResponse({**row, "job": None, "samples": []})
        return JSONResponse({**row, "job": self.store.job(row["job"]).row(), "samples": self.store.said(row["job"])})

    @speaks(ActivateBody, optional=True, key="required")
    async def activate(self, version: Number, request: Request) -> Response:
        body = await read_if_any(ActivateBody, request)
        return await self._repeatable(request, lambda: self.conductor.activate(version, _who(request), body.why))

    @speaks(query=("most",))
    async def audit(self, request: Request) -> Response:
        return JSONResponse({"audit": self.store.audit(_most(request, 100))})

    async def _repeatable(self, request: Request, work: Callable[[], Awaitable[Mapping[str, Any]]]) -> Response:
        """Do the work once per key. Repeating it after a crash of the server is harmless."""
        once = await _once(request)
        async with self._turns.setdefault(once.key, asyncio.Lock()):  # removed after its last holder
            if (reply := self.store.answered(once)) is None:
                reply = await self.store.answer(once, await work())
        return JSONResponse(reply)


def _sse(event: Event) -> str:
    data = json.dumps(event.data, allow_nan=False, separators=(",", ":"))  # ASCII, as in serve/openai/routes.py
    return f"id: {event.number}\nevent: {event.kind}\ndata: {data}\n\n"


def _who(request: Request) -> str:
    return str(request.scope.get(WHO, "admin"))


def _most(request: Request, usual: int) -> int:
    if (most := _asked(request, "most", usual)) > _MOST:
        raise RequestRefused(422, f"must be at most {_MOST}", field="most")
    return most


def _asked(request: Request, name: str, usual: int) -> int:
    text = request.query_params.get(name, str(usual))
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise RequestRefused(422, f"'{text[:40]}' is not a number, or is too large", field=name)
    return int(text)


async def _once(request: Request, *, needed: bool = True) -> RequestKey:
    """Return the request's key. Not `needed`: a write without one gets a new key, so sending it again repeats it."""
    key = idempotency_key(request, "" if needed else uuid.uuid4().hex)
    digest = hashlib.sha256(f"{request.method} {request.url.path}?{request.url.query}\n".encode())
    body = body_at_hand(request)
    if len(body) > AT_ONCE_BYTES:
        await aside(request)(digest.update, body)
    else:
        digest.update(body)
    return RequestKey(key, digest.digest())
