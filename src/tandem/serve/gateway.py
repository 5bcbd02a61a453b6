"""The gateway: OpenAI's routes over an engine, recording every conversation token by token for a later reward.

POST   /sessions               open a session; a client only has to use its base_url
GET    /sessions               list the open sessions
GET    /refused                list groups that were refused on delivery, with the reasons
POST   /stamps                 return which versions sampled the tokens of a group that was posted elsewhere
GET    /sessions/{id}          show its turns: ids, logprobs, versions, text
POST   /sessions/{id}/reward   set its reward; its branches become trajectories of one group
DELETE /sessions/{id}          drop it
/v1/..., /generate             in a session by the header X-Tandem-Session, or by the path /sessions/{id}/...
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge
from pydantic import Field

from tandem.errors import GroupRefused, TandemError
from tandem.io.request_key import RequestKey
from tandem.rollout.atropos.version_lookup import stamp_frame
from tandem.rollout.sessions.sessions import Bounds, SessionRenderer, Sessions, summary
from tandem.rollout.sessions.store import Deliver, FinishedGroup, SessionStore
from tandem.rollout.sessions.tree import Session, turn_row
from tandem.rollout.wire.codec import BINARY, GroupsPost
from tandem.serve.http.openapi_document import speaks
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.service import Service, aside, body_at_hand
from tandem.serve.openai.choices import OpenedSamples
from tandem.serve.openai.generate_route import Generate
from tandem.serve.openai.requests import checked, read, read_if_any
from tandem.serve.openai.routes import SESSION_HEADER, ChatRenderer, OpenAi, Sampler, Tools, encoded
from tandem.serve.openai.service import openai_router
from tandem.serve.openai.strict import Strict
from tandem.types import MAX_NUMBER, Message

_log = logging.getLogger(__name__)

_TRY_AGAIN_S, _MOST_PAUSE_S, _TIDY_S = 2.0, 300.0, 30.0
_AT_A_TIME = 8  # concurrent deliveries
_MAX_KEY, _MAX_REASON, _MAX_SHOWN = 255, 2000, 100


class Recording(ChatRenderer, SessionRenderer, Protocol):
    """The renderer methods that the gateway uses: OpenAI's routes and sessions."""


def gateway_service(
    engine: Sampler,
    renderer: Recording,
    store: SessionStore,
    deliver: Deliver,
    *,
    model_id: str,
    context: int,
    num_ids: int,
    bounds: Bounds | None = None,
    max_requests: int = 4096,
) -> Service:
    """Build the service. `context`: most tokens of prompt and completion together. `num_ids`: size of the vocabulary.
    `max_requests`: most samples at a time."""
    renderer = renderer.within(context)
    sessions = Sessions(renderer, store, bounds)
    openai = OpenAi(engine, renderer, Recorded(sessions), model_id, context, num_ids, max_requests)
    _count(sessions, store, openai.books.registry)
    api = _GatewayApi(sessions, store, _Delivery(sessions, store, deliver, openai.books.registry))
    router = APIRouter()
    for prefix in ("", "/sessions/{session}"):
        router.include_router(openai_router(openai, f"{prefix}/v1"))
        router.include_router(Generate(openai).router(prefix))
    router.add_api_route("/sessions", api.open, methods=["POST"])
    router.add_api_route("/sessions", api.list, methods=["GET"])
    router.add_api_route("/refused", api.refused, methods=["GET"])
    router.add_api_route("/stamps", api.stamps, methods=["POST"])
    router.add_api_route("/sessions/{session}", api.show, methods=["GET"])
    router.add_api_route("/sessions/{session}", api.drop, methods=["DELETE"])
    router.add_api_route("/sessions/{session}/reward", api.reward, methods=["POST"])
    limits = openai.limits | {name: int(value) for name, value in asdict(sessions.bounds).items()}

    async def close() -> None:
        await api.delivery.close()
        await engine.close()
        store.close()

    return Service(
        "tandem gateway serve", router, limits, openai.books.registry, close, lambda: store.broken, api.start,
        body_types=frozenset({"application/json", BINARY}),
    )  # fmt: skip


def _count(sessions: Sessions, store: SessionStore, registry: CollectorRegistry) -> None:
    numbers: dict[str, tuple[str, Callable[[], float]]] = {
        "tandem_sessions_open": ("Sessions that are open.", lambda: len(sessions)),
        "tandem_sessions_bytes": ("Memory of open sessions.", lambda: sessions.num_bytes),
        "tandem_sessions_made": ("Sessions opened since the start.", lambda: sessions.made),
        "tandem_sessions_expired": ("Sessions forgotten without a reward.", lambda: sessions.expired),
        "tandem_session_branches_made": ("Turns that branched off an earlier one.", lambda: sessions.branched),
        "tandem_sessions_undelivered": ("Finished sessions that are not delivered.", lambda: store.num_undelivered),
        "tandem_groups_refused": ("Groups that were refused on delivery and set aside.", lambda: store.num_refused),
    }
    for name, (text, number) in numbers.items():
        Gauge(name, text, registry=registry).set_function(number)


class Recorded:
    """Match requests to recorded turns, and record their samples as new turns."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions

    records = True

    async def chat(
        self, request: Request, messages: Sequence[Message], tools: Tools, n: int, renderer: ChatRenderer
    ) -> OpenedSamples:
        point = await aside(request)(self.sessions.chat(self._named(request), messages, tools))
        return self._opened([point.session], self.sessions.samples(point, n))

    async def text(self, request: Request, prompts: Sequence[str | list[int]], n: int) -> OpenedSamples:
        named = self._named(request)
        points = [await encoded(request, prompts, self.sessions.text(named, prompt)) for prompt in prompts]
        samples = [sample for point in points for sample in self.sessions.samples(point, n)]
        return self._opened([point.session for point in points], samples)

    def _named(self, request: Request) -> Session | None:
        in_path, in_header = request.path_params.get("session"), request.headers.get(SESSION_HEADER)
        if in_path and in_header and in_path != in_header:
            raise RequestRefused(422, f"{SESSION_HEADER} names another session than the path", field=SESSION_HEADER)
        named = in_path or in_header
        return self.sessions.find(named) if named else None

    def _opened(self, sessions: Sequence[Session], places: Sequence[Any]) -> OpenedSamples:
        distinct = {session.id: session for session in sessions}

        @contextmanager
        def in_progress() -> Generator[None]:
            with ExitStack() as stack:
                for session in distinct.values():
                    stack.enter_context(self.sessions.in_progress(session))
                yield

        return OpenedSamples(places, in_progress)


# --- the routes


class OpenBody(Strict):
    group: str = Field(default="", max_length=256)
    group_size: int = Field(default=0, ge=0, le=4096)
    task_id: str = Field(default="", max_length=256)


Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]


class RewardBody(Strict):
    reward: Number
    metrics: Annotated[dict[Annotated[str, Field(max_length=128)], Number], Field(max_length=256)] = Field(default={})
    branch: str = Field(default="", max_length=64)
    finish: bool | None = None


class _GatewayApi:
    def __init__(self, sessions: Sessions, store: SessionStore, delivery: _Delivery) -> None:
        self.sessions, self.store, self.delivery = sessions, store, delivery
        self._keys: dict[str, tuple[asyncio.Lock, int]] = {}

    async def start(self) -> None:
        for session in self.store.open_sessions(self.sessions.now()):
            self.sessions.take_back(session)
        self.delivery.start()

    @speaks(OpenBody, optional=True, status=201, key="optional")
    async def open(self, request: Request) -> JSONResponse:
        body = await read_if_any(OpenBody, request)
        async with self._once(request) as once:
            if (reply := self.store.answered(once)) is None:
                session = self.sessions.new(group=body.group, group_size=body.group_size, task_id=body.task_id)
                self.sessions.open(session)
                reply = {"id": session.id, "base_url": f"{request.base_url}sessions/{session.id}/v1"}
                try:
                    await self.store.answered_open(session, once, reply)
                except TandemError:
                    self.sessions.drop(session)
                    raise
            return JSONResponse(reply, 201)

    async def list(self) -> JSONResponse:
        self.sessions.expire()
        return JSONResponse({"sessions": [summary(session) for session in self.sessions.all()]})

    async def show(self, session: str) -> JSONResponse:
        found = self.sessions.find(session)
        rewards = {branch: reward for branch, (reward, _) in found.rewards.items()}
        turns = [_shown(turn_row(turn)) for turn in found.turns.values()]
        return JSONResponse(summary(found) | {"rewards": rewards, "turns": turns})

    @speaks(key="optional")
    async def drop(self, session: str, request: Request) -> JSONResponse:
        async with self._once(request) as once:
            if (reply := self.store.answered(once)) is None:
                found = self.sessions.find(session)
                if found.running or found.finishing:
                    raise RequestRefused(409, f"session '{session}' has requests in progress; wait for them")
                reply = {"id": session, "dropped": True}
                self.sessions.drop(found)
                await self.store.answer(once, reply)
                self.delivery.wake()
            return JSONResponse(reply)

    @speaks(GroupsPost, types=(BINARY,))
    async def stamps(self, request: Request) -> Response:
        """Return which versions sampled the tokens of a group that an environment posted to a rollout service."""
        return Response(stamp_frame(self.sessions.record, body_at_hand(request)), media_type="application/json")

    async def refused(self) -> JSONResponse:
        return JSONResponse({"count": self.store.num_refused, "groups": self.store.refused(_MAX_SHOWN)})

    @speaks(RewardBody, key="optional")
    async def reward(self, session: str, request: Request) -> JSONResponse:
        body = await read(request, partial(checked, RewardBody))
        async with self._once(request) as once:
            if (reply := self.store.answered(once)) is None:
                reply = await self._reward(self.sessions.find(session), body, once)
            return JSONResponse(reply)

    async def _reward(self, session: Session, body: RewardBody, once: RequestKey | None) -> dict[str, Any]:
        rewards = self.sessions.judge(session, body.reward, body.metrics, body.branch)
        left = [turn.id for turn in session.leaves if turn.id not in rewards]
        finished = body.finish if body.finish is not None else not left
        reply = {"id": session.id, "finished": finished, "branches": list(rewards), "unrewarded": left}
        if not finished:
            await self.store.rewarded(session, rewards, once, reply)
            session.rewards = rewards
            return reply
        session.finishing = True
        try:
            await self.store.finished(session, self.sessions.trajectories(session, rewards), once, reply)
        except BaseException:
            session.finishing = False
            raise
        self.sessions.forget(session)
        self.delivery.wake()
        return reply

    @asynccontextmanager
    async def _once(self, request: Request) -> AsyncIterator[RequestKey | None]:
        """Handle one request per key at a time: a second waits for the first one's reply."""
        key = request.headers.get("idempotency-key", "")
        if not key:
            yield None
            return
        if len(key) > _MAX_KEY:
            raise RequestRefused(422, f"longer than {_MAX_KEY} characters", field="idempotency-key")
        lock, waiting = self._keys.get(key, (asyncio.Lock(), 0))
        self._keys[key] = lock, waiting + 1
        try:
            async with lock:
                digest = blake2b(request.url.path.encode() + b"\n", digest_size=16)
                digest.update(body_at_hand(request))
                yield RequestKey(key, digest.digest())
        finally:
            lock, waiting = self._keys.pop(key)
            if waiting > 1:
                self._keys[key] = lock, waiting - 1


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("ends", "text_size")}


# --- delivery


class _Delivery:
    """Deliver complete groups, several at a time, and retry until they arrive.

    A group that failed is retried after a growing pause, behind groups that have not failed. A group that the receiver
    refuses is set aside.
    """

    def __init__(self, sessions: Sessions, store: SessionStore, deliver: Deliver, registry: CollectorRegistry) -> None:
        self._sessions, self._store, self._deliver = sessions, store, deliver
        self._changed = asyncio.Event()
        self._queue: asyncio.PriorityQueue[tuple[int, int, FinishedGroup]] = asyncio.PriorityQueue()
        self._order = itertools.count()
        self._queued = set[str]()
        self._delivered = set[str]()
        """Groups delivered since the last listing began: that listing may still contain them."""
        self._failed: dict[str, tuple[int, float]] = {}
        """By group: number of failures, and the time of the next try."""
        self._tasks: list[asyncio.Task[None]] = []
        self.groups = Counter("tandem_groups_delivered", "Groups delivered.", registry=registry)
        self.failures = Counter("tandem_delivery_failures", "Deliveries that are tried again.", registry=registry)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(work()) for work in (self._run, *[self._work] * _AT_A_TIME)]

    def wake(self) -> None:
        self._changed.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                self._sessions.expire()
                await self._store.tidy()
                self._delivered.clear()
                wait_s = self._enqueue(await self._store.finished_groups())
            except TandemError as error:  # such as a full disk: acknowledged sessions stay stored
                _log.warning("deliveries: %s", error)
                wait_s = _TRY_AGAIN_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)

    def _enqueue(self, groups: Sequence[FinishedGroup]) -> float:
        """Queue the groups that are due; return the seconds until more may be."""
        now = time.monotonic()
        wait_s = _TIDY_S
        for group in groups:
            failures, due = self._failed.get(group.name, (0, now))
            if group.name in self._queued or group.name in self._delivered:
                continue
            if due > now:
                wait_s = min(wait_s, due - now)
                continue
            self._queued.add(group.name)
            self._queue.put_nowait((failures, next(self._order), group))
        return wait_s

    async def _work(self) -> None:
        while True:
            failures, _, group = await self._queue.get()
            try:
                await self._deliver_one(group)
                self._failed.pop(group.name, None)
            except (TandemError, OSError) as error:
                pause_s = min(_TRY_AGAIN_S * 2 ** min(failures, 16), _MOST_PAUSE_S)
                self._failed[group.name] = (failures + 1, time.monotonic() + pause_s)
                self.failures.inc()
                _log.warning(
                    "group %s could not be delivered; retry in %g s: %s: %s",
                    group.name, pause_s, type(error).__name__, error,
                )  # fmt: skip
                self._changed.set()  # its pause may end before the next listing
            finally:
                self._queued.discard(group.name)

    async def _deliver_one(self, group: FinishedGroup) -> None:
        try:
            if group.rows:
                await self._deliver(group)
        except GroupRefused as error:
            refused: Exception = error
        except (TandemError, OSError):
            raise
        except (OverflowError, RecursionError, TypeError, ValueError) as error:  # it cannot be serialised
            refused = error
        else:
            await self._store.delivered(group)
            self._delivered.add(group.name)
            self.groups.inc()
            return
        _log.error("group %s is set aside: %s: %s", group.name, type(refused).__name__, refused)
        await self._store.set_aside(group, f"{type(refused).__name__}: {refused}"[:_MAX_REASON])
        self._delivered.add(group.name)
