"""The rollout service's native HTTP API: environments post scored groups, trainers take batches.

POST /v2/trainer                        register the trainer: returns an epoch, which it sends with each call
POST /v2/trainer/version                announce the trainer's version
POST /v2/trainer/leave                  unregister: its leases return, and another run may register
POST /v2/environments                   register an environment: returns its id
POST /v2/environments/{id}/alive        heartbeat during a long episode
POST /v2/environments/{id}/disconnect   unregister
POST /v2/tickets                        admit: the right to play a group; waits for a slot
POST /v2/tickets/{order}/drop           give up a ticket: nothing to learn
POST /v2/groups                         put: JSON, or application/x-tandem-groups
POST /v2/leases                         take: waits for groups; JSON, or binary by the Accept header
POST /v2/leases/{id}/renew              extend a lease
POST /v2/release                        free slots: the engine holds the version that taken groups trained
POST /v2/ack                            acknowledge: a checkpoint contains the groups
GET  /v2/status  /v2/environments/{id}  numbers
GET  /v2/groups  /v2/groups/{id}        groups that are queued or under lease
GET  /v2/quarantine                     what was refused, and why
GET  /                                  a page that shows these to people; it asks for the token

Every write except `alive` and `renew` carries an Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from tandem.errors import GroupRefused
from tandem.io.request_key import RequestKey
from tandem.rollout.queue.queue import RolloutQueue
from tandem.rollout.queue.types import RegisteredEnvironment, TrainerSpec
from tandem.rollout.remote import lease_codec
from tandem.rollout.wire import codec
from tandem.rollout.wire.schema import MAX_HEAD_BYTES, MAX_SIBLINGS, MAX_TOKENS, decoded
from tandem.serve.http.openapi_document import JSON, speaks
from tandem.serve.http.pages import page
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.request_bounds import AT_ONCE_BYTES, check_containers, check_values, idempotency_key
from tandem.serve.http.service import HotRoute, Service, aside, body_at_hand, let_go, unless_gone
from tandem.serve.rollouts.prometheus import registry

BODY_BYTES = 64 * 2**20

_AT_ONCE = 256 * 2**10  # larger bodies are parsed off the event loop

Body = TypeVar("Body", bound=msgspec.Struct)
Count = Annotated[int, msgspec.Meta(ge=0, le=2**16)]
Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Extra = dict[str, Any]


class _RolloutBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class NothingBody(_RolloutBody, frozen=True):
    pass


class TrainerBody(_RolloutBody, frozen=True):
    run_id: Text
    groups_per_step: Whole = 0
    sequences_per_step: Whole = 0
    max_lag: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = 0
    version: Whole = 0
    num_ids: Whole = 0
    max_tokens: Whole = 0
    tokenizer: Text = ""
    max_dropped: Whole = 256
    lease_s: float = 600.0
    extra: Extra = {}
    fresh: bool = False


class EnvironmentBody(_RolloutBody, frozen=True):
    name: Text
    weight: float = 1.0
    min_share: float = 0.0
    group_size: Whole = 0
    max_tokens: Whole = 0
    lapse_s: float = 300.0
    tokenizer: Text = ""
    extra: Extra = {}


class VersionBody(_RolloutBody, frozen=True):
    epoch: Whole
    version: Whole


class TicketsBody(_RolloutBody, frozen=True):
    environment: Whole
    count: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    wait_s: Seconds = 0.0


class DropBody(_RolloutBody, frozen=True):
    environment: Whole
    reason: Text


class TakeBody(_RolloutBody, frozen=True):
    epoch: Whole
    groups: Count = 0
    sequences: Count = 0
    version: Whole | None = None
    wait_s: Seconds = 0.0


class EpochBody(_RolloutBody, frozen=True):
    epoch: Whole


class ReleaseBody(_RolloutBody, frozen=True):
    epoch: Whole
    count: Whole
    version: Whole | None = None


class AckBody(_RolloutBody, frozen=True):
    epoch: Whole
    leases: list[Whole] = []
    groups: list[Whole] = []


def rollouts_service(queue: RolloutQueue, *, greets: bool = True) -> Service:
    """Build the service. `greets`: GET / is its page; otherwise the caller adds another."""
    api, router = _RolloutApi(queue), APIRouter()
    posts = {
        "trainer": api.trainer, "trainer/version": api.version, "trainer/leave": api.leave,
        "environments": api.environment,
        "environments/{id}/alive": api.alive, "environments/{id}/disconnect": api.disconnect,
        "tickets/{order}/drop": api.drop, "leases": api.take, "leases/{id}/renew": api.renew, "release": api.release,
        "ack": api.ack,
    }  # fmt: skip
    gets = {
        "status": api.status, "environments/{id}": api.environment_status, "groups": api.groups,
        "groups/{id}": api.group, "quarantine": api.quarantine,
    }  # fmt: skip
    for path, answer in posts.items():
        router.add_api_route(f"/v2/{path}", answer, methods=["POST"])
    for path, answer in gets.items():
        router.add_api_route(f"/v2/{path}", answer, methods=["GET"])
    if greets:
        router.add_api_route("/", page("rollouts.html"), methods=["GET"])
    limits = queue.limits
    told = {
        "queued_groups": limits.max_queued, "groups_per_post": limits.max_groups_per_post,
        "environments": limits.max_environments, "siblings": MAX_SIBLINGS, "group_tokens": MAX_TOKENS,
        "group_head_bytes": MAX_HEAD_BYTES, "wait_s": int(limits.max_wait_s), "play_s": int(limits.max_play_s),
        "keys_kept_s": int(limits.answers_kept_s),
    }  # fmt: skip
    return Service(
        "tandem rollouts serve",
        router,
        told,
        registry(queue),
        close=queue.close,
        why_unfit=lambda: queue.broken,
        body_types=frozenset({"application/json", codec.BINARY}),
        gzip=True,
        open_paths=frozenset({"/"}),
        hot=[HotRoute("/v2/groups", api.put), HotRoute("/v2/tickets", api.tickets)],
    )


class _RolloutApi:
    def __init__(self, queue: RolloutQueue) -> None:
        self.queue = queue

    # --- registration

    @speaks(TrainerBody, key="required")
    async def trainer(self, request: Request) -> Response:
        body, once = await _asked(request, TrainerBody)
        fields = msgspec.structs.asdict(body)
        fresh = fields.pop("fresh")
        return _json(await self.queue.registration.register_trainer(TrainerSpec(**fields), fresh=fresh, once=once))

    @speaks(VersionBody, key="required")
    async def version(self, request: Request) -> Response:
        body, once = await _asked(request, VersionBody)
        await self.queue.trainer.announce_version(body.epoch, body.version, once=once)
        return _json({"version": body.version})

    @speaks(EpochBody, key="required")
    async def leave(self, request: Request) -> Response:
        body, once = await _asked(request, EpochBody)
        await self.queue.registration.leave(body.epoch, once=once)
        return _json({})

    @speaks(EnvironmentBody, key="required")
    async def environment(self, request: Request) -> Response:
        body, once = await _asked(request, EnvironmentBody)
        spec = RegisteredEnvironment(**msgspec.structs.asdict(body))
        return _json(await self.queue.registration.register_environment(spec, once=once))

    async def alive(self, id: int) -> Response:
        self.queue.environments.heartbeat(id)
        return _json({"version": self.queue.version})

    @speaks(NothingBody, optional=True, key="required")
    async def disconnect(self, id: int, request: Request) -> Response:
        _, once = await _asked(request, NothingBody)
        await self.queue.registration.disconnect(id, once=once)
        return _json({})

    # --- the environment's calls

    @speaks(TicketsBody, key="required")
    async def tickets(self, request: Request) -> Response:
        body, once = await _asked(request, TicketsBody)
        admit = self.queue.environments.admit(body.environment, body.count, wait_s=body.wait_s, once=once)
        tickets = await unless_gone(request, admit)
        return _json({"tickets": [ticket.order for ticket in tickets], "version": self.queue.version})

    @speaks(DropBody, key="required")
    async def drop(self, order: int, request: Request) -> Response:
        body, once = await _asked(request, DropBody)
        await self.queue.environments.drop(body.environment, order, body.reason, once=once)
        return _json({})

    @speaks(codec.GroupsPost, types=(JSON, codec.BINARY), query=("environment",), key="required")
    async def put(self, request: Request) -> Response:
        environment = _whole(request.query_params.get("environment"), "environment")
        binary = request.headers.get("content-type", "").partition(";")[0].strip().lower() == codec.BINARY
        key, large = idempotency_key(request), len(body_at_hand(request)) > _AT_ONCE
        beginning = body_at_hand(request)[: self.queue.limits.quarantine_bytes]

        def read() -> tuple[list[codec.WireGroup], RequestKey]:
            body, most = body_at_hand(request), self.queue.limits.max_groups_per_post
            if not binary:
                check_containers(body)
            groups = codec.read_frames(body, max_groups=most) if binary else codec.read_json(body, max_groups=most)
            return groups, _once(request, key, body)

        try:
            groups, once = await asyncio.to_thread(read) if large else read()
            if not binary:  # binary frames are views of the body, so it must stay
                let_go(request)
            stored = await self.queue.environments.put(groups, environment=environment, once=once)
        except GroupRefused as refused:
            await self.queue.environments.quarantine(environment, refused.field, refused.text, beginning)
            raise
        return _json({"groups": stored, "version": self.queue.version})

    # --- the trainer's calls

    @speaks(TakeBody, answers=(JSON, codec.BINARY), key="required")
    async def take(self, request: Request) -> Response:
        body, once = await _asked(request, TakeBody)
        take = self.queue.trainer.take(
            body.epoch, body.groups, sequences=body.sequences, version=body.version, wait_s=body.wait_s, once=once
        )
        lease = await unless_gone(request, take)
        if lease is None:
            return Response(status_code=204)
        if codec.BINARY in request.headers.get("accept", ""):
            return Response(await asyncio.to_thread(lease_codec.encode_lease, lease), media_type=codec.BINARY)
        return Response(await asyncio.to_thread(lease_codec.lease_to_json, lease), media_type="application/json")

    @speaks(EpochBody)
    async def renew(self, id: int, request: Request) -> Response:
        body = _parsed(body_at_hand(request), EpochBody)
        return _json({"seconds": await self.queue.trainer.renew(body.epoch, id)})

    @speaks(ReleaseBody, key="required")
    async def release(self, request: Request) -> Response:
        body, once = await _asked(request, ReleaseBody)
        await self.queue.trainer.release(body.epoch, body.count, version=body.version, once=once)
        return _json({})

    @speaks(AckBody, key="required")
    async def ack(self, request: Request) -> Response:
        body, once = await _asked(request, AckBody)
        return _json({"groups": await self.queue.trainer.ack(body.epoch, body.leases, groups=body.groups, once=once)})

    # --- for people

    async def status(self) -> Response:
        return _json(self.queue.status())

    async def environment_status(self, id: int) -> Response:
        return _json(self.queue.environment_status(id))

    @speaks(query=("most",))
    async def groups(self, request: Request) -> Response:
        most = _whole(request.query_params.get("most"), "most")
        return _json({"groups": self.queue.groups(20 if most is None else min(most, 1000))})

    async def group(self, id: int) -> Response:
        taken = await self.queue.group(id)
        found = await asyncio.to_thread(lease_codec.groups_to_json, [taken])
        return _json(found[0])

    async def quarantine(self) -> Response:
        return _json({"quarantine": self.queue.quarantined()})


# --- requests


async def _asked(request: Request, kind: type[Body]) -> tuple[Body, RequestKey]:
    body, key = body_at_hand(request), idempotency_key(request)

    def read() -> tuple[Body, RequestKey]:
        check_values(body)
        return _parsed(body, kind), _once(request, key, body)

    asked, once = await aside(request)(read) if len(body) > AT_ONCE_BYTES else read()
    let_go(request)  # frees the body: the call may wait for a minute
    return asked, once


def _parsed(body: bytes, kind: type[Body]) -> Body:
    return decoded(msgspec.json.Decoder(kind), body or b"{}", "", "body")


def _once(request: Request, key: str, body: bytes) -> RequestKey:
    digest = hashlib.sha256(f"{request.method} {request.url.path}?{request.url.query}\n".encode())
    digest.update(body)
    return RequestKey(key, digest.digest())


def _whole(text: str | None, field: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestRefused(422, f"'{text[:40]}' is not a number", field=field)
    return int(text)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
