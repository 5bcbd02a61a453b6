"""The HTTP endpoints of Atropos, for unmodified Atropos environments and trainers.

GET  /                  a greeting; for a browser the service's page
POST /register          register a trainer
POST /register-env      register an environment; {"status": "wait for trainer to start"} until a trainer fetches
POST /disconnect-env    unregister an environment; the groups that it posted stay
GET  /wandb_info, /info what the trainer registered
POST /scored_data       post a group
POST /scored_data_list  post several
GET  /batch             exactly batch_size sequences, or null; acknowledges the batch before
GET  /status            {current_step, queue_size}
GET  /status-env        {"env_id"} as a JSON body, as Atropos clients send it, or ?env_id=
GET  /latest_example    the last group
GET  /reset_data        clear everything; only where no token is required

Atropos clients send no token and retry only on 5xx: see docs/atropos.md. Their GETs change state, so pages of other
origins must not reach them; `serve/http` refuses such requests.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from tandem.errors import GroupRefused, QueueFull, StoreError, StoreTimeout
from tandem.rollout.atropos.codec import KEYS, ScoredData, why_refused
from tandem.rollout.atropos.service import Atropos, AtroposBatch, NotRegistered, TrainerRegistration
from tandem.serve.http.openapi_document import JSON, PAGE, speaks
from tandem.serve.http.pages import page
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.service import HotRoute, body_at_hand

_log = logging.getLogger(__name__)

_READ_S = 60.0  # for a trainer to read the next piece of its batch; after that it counts as disconnected
_PIECE_BYTES = 1 << 20
_FULL = RequestRefused(507, "the queue is full; send it again later")

_JSON = "application/json"

Body = TypeVar("Body", bound=msgspec.Struct)
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), lt=2**53)]


class RegisterBody(msgspec.Struct, frozen=True):
    """Unknown fields are ignored, as Atropos does."""

    batch_size: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    max_token_len: Whole
    wandb_group: str | None = ""
    wandb_project: str | None = ""
    checkpoint_dir: str | None = ""
    save_checkpoint_interval: Whole = -1
    starting_step: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
    num_steps: Whole = -1


class AtroposEnvironmentBody(msgspec.Struct, frozen=True):
    group_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    max_token_length: Whole = -1
    desired_name: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    weight: float | None = 1.0
    min_batch_allocation: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


class EnvironmentId(msgspec.Struct, frozen=True):
    env_id: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


def atropos_routes(atropos: Atropos, *, may_reset: bool) -> tuple[list[HotRoute], APIRouter]:
    """Build the routes. `may_reset`: GET /reset_data clears everything, for any caller."""
    api, router = _AtroposApi(atropos, may_reset=may_reset), APIRouter()
    for name in ("register", "register-env", "disconnect-env"):
        router.add_api_route(f"/{name}", getattr(api, name.replace("-", "_")), methods=["POST"])
    for name in ("wandb_info", "info", "batch", "status", "latest_example", "reset_data"):
        router.add_api_route(f"/{name}", getattr(api, name), methods=["GET"], response_model=None)
    router.add_api_route("/", api.root, methods=["GET"])
    hot = [
        HotRoute("/scored_data", api.scored_data), HotRoute("/scored_data_list", api.scored_data_list),
        HotRoute("/status-env", api.status_env, "GET"),
    ]  # fmt: skip
    return hot, router


class _AtroposApi:
    def __init__(self, atropos: Atropos, *, may_reset: bool) -> None:
        self.atropos, self.may_reset = atropos, may_reset

    @speaks(answers=(JSON, PAGE))
    async def root(self, request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return await page("rollouts.html")()
        return JSONResponse({"message": "Tandem rollouts, as AtroposLib API"}, headers={"Vary": "Accept"})

    @speaks(RegisterBody)
    async def register(self, request: Request) -> Response:
        body = _parsed(await request.body(), RegisterBody)
        given = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
        await self.atropos.register(TrainerRegistration(**given))
        return Response(msgspec.json.encode({"uuid": 0}).replace(b"0", b"%d" % uuid.uuid4().int), media_type=_JSON)

    @speaks(AtroposEnvironmentBody)
    async def register_env(self, request: Request) -> dict[str, Any]:
        body = _parsed(await request.body(), AtroposEnvironmentBody)
        try:
            env_id, name = await self.atropos.register_environment(
                body.desired_name or "",
                weight=1.0 if body.weight is None else body.weight,
                group_size=body.group_size,
                max_token_length=body.max_token_length,
                min_share=body.min_batch_allocation or 0.0,
            )
        except NotRegistered as wait:
            return {"status": str(wait)}
        trainer = self.atropos.trainer
        assert trainer is not None
        return {
            "status": "success", "env_id": env_id, "wandb_name": name, "checkpoint_dir": trainer.checkpoint_dir,
            "starting_step": self.atropos.step, "checkpoint_interval": trainer.save_checkpoint_interval,
            "num_steps": trainer.num_steps,
        }  # fmt: skip

    @speaks(EnvironmentId)
    async def disconnect_env(self, request: Request) -> dict[str, str]:
        body = _parsed(await request.body(), EnvironmentId)
        try:
            await self.atropos.queue.registration.disconnect(self.atropos.id_of(body.env_id))
        except StoreError as error:
            return {"status": "failure", "error": str(error)}
        return {"status": "success"}

    async def wandb_info(self) -> dict[str, str | None]:
        trainer = self.atropos.trainer
        return {"group": trainer and trainer.wandb_group, "project": trainer and trainer.wandb_project}

    async def info(self) -> dict[str, int]:
        trainer = self.atropos.trainer
        if trainer is None:
            return {"batch_size": -1, "max_token_len": -1}
        return {"batch_size": trainer.batch_size, "max_token_len": trainer.max_token_len}

    @speaks(ScoredData)
    async def scored_data(self, request: Request) -> Response:
        return await self._post(request, many=False)

    @speaks(list[ScoredData])
    async def scored_data_list(self, request: Request) -> Response:
        return await self._post(request, many=True)

    async def _post(self, request: Request, *, many: bool) -> Response:
        try:
            return JSONResponse(await self.atropos.post(body_at_hand(request), many=many))
        except GroupRefused as error:
            raise RequestRefused(422, str(error), field=error.field) from error
        except StoreTimeout as error:
            raise RequestRefused(503, str(error)) from error
        except QueueFull as error:
            raise _FULL from error  # not 429: Atropos clients drop a group on 4xx and retry on 5xx

    async def batch(self) -> Response:
        try:
            batch = await self.atropos.batch()
        except NotRegistered as error:
            return JSONResponse({"status": "error", "message": str(error), "batch": []})
        if batch is not None:
            return _HandOver(self.atropos, batch)
        why = self.atropos.why_no_batch()
        return JSONResponse({"batch": None, "message": why} if why else {"batch": None})

    async def status(self) -> dict[str, Any]:
        return await self.atropos.status()

    @speaks(query=("env_id",))
    async def status_env(self, request: Request) -> Response:
        body = await request.body()
        if not body:
            number = request.query_params.get("env_id", "")
            body = b'{"env_id":%s}' % number.encode() if number.isdecimal() and number.isascii() else b"{}"
        try:
            return JSONResponse(self.atropos.environment_status(_parsed(body, EnvironmentId).env_id))
        except GroupRefused as error:
            raise RequestRefused(404, str(error), field="env_id") from error

    async def latest_example(self) -> Response:
        latest = self.atropos.latest()
        if latest is not None:
            return Response(latest, media_type=_JSON)
        return JSONResponse({name: [] for name in (*KEYS[:8], "images")})

    @speaks(answers=("text/plain",))
    async def reset_data(self) -> Response:
        if not self.may_reset:
            raise RequestRefused(403, "GET /reset_data clears everything; it needs --atropos and --insecure-no-auth")
        await self.atropos.reset()
        return PlainTextResponse("Reset successful")


def _parsed(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except Exception as error:
        if not isinstance(error, ValueError | RecursionError):
            raise
        refused = why_refused(error, body, keys=tuple(kind.__struct_fields__))
        raise RequestRefused(422, str(refused), field=refused.field) from None


def _joined(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Join small pieces: a write for each would cost more."""
    small, size = list[bytes | memoryview](), 0
    for piece in pieces:
        if size + len(piece) > _PIECE_BYTES and small:
            yield small[0] if len(small) == 1 else b"".join(small)
            small, size = [], 0
        small.append(piece)
        size += len(piece)
    yield b"".join(small)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _HandOver(Response):
    """Send a batch so that it is acknowledged exactly if it arrived: (1) send all but the last bytes, (2) record on
    disk that they were sent, (3) send the last bytes. A trainer that disconnects before (2) gets the same batch
    again; one that has all bytes never does."""

    def __init__(self, atropos: Atropos, batch: AtroposBatch) -> None:
        super().__init__(media_type=_JSON)
        self.atropos, self.batch = atropos, batch
        groups = [piece for group in batch.groups for piece in (b",", group)][1:]
        self.pieces = [b'{"batch":[', *groups]
        self.headers["content-length"] = str(sum(len(piece) for piece in self.pieces) + 2)
        atropos.handing_over(batch)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_hung_up(receive))
        whole = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for piece in chain(
                _joined(self.pieces), (b"",)
            ):  # the empty one is sent once the system accepted all others
                async with asyncio.timeout(_READ_S):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)
                if gone.done():
                    return
            await self.atropos.handed_over(self.batch)
            await asyncio.sleep(0)  # lets `gone` notice a disconnect
            if not gone.done():  # otherwise the client never read the bytes that the system accepted
                await send({"type": "http.response.body", "body": b"]}", "more_body": False})
                whole = True
        except TimeoutError:
            _log.warning("a trainer did not read its batch within %g s; the next fetch returns it again", _READ_S)
        finally:
            gone.cancel()
            try:
                if not whole:
                    await self.atropos.handed_over(self.batch, False)
            finally:
                self.atropos.end_handing_over(self.batch)
