"""Serve an engine over HTTP: it streams completions as token ids, and a trainer updates its weights.

GET  /engine/status     return the state, the version and the attached trainer
POST /engine/generate   sample after token ids; streams lines of token ids, logprobs and versions
POST /engine/attach     open the engine's end of a bridge from a trainer's link; fences the trainer attached before
POST /engine/load       receive a version and serve it; returns the fingerprints of the served weights
POST /engine/sleep      pause the engine under a lease, or renew the lease
POST /engine/wake       end the pause
POST /engine/digest     compute fingerprints of the served weights now

OpenAI's routes use the same engine. All routes are behind the access gate that all services share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from tandem.errors import EngineError, SyncError, TandemError
from tandem.io.engine_messages import StreamEnd, Tokens, code_of, encoded, line, served_as_json
from tandem.serve.engine.link_rules import Allowed
from tandem.serve.engine.weight_control import LocalEngine, OpenSource, WeightCaller, WeightControl
from tandem.serve.http.openapi_document import LINES, speaks
from tandem.serve.http.refusals import RequestRefused, as_refused, refusal
from tandem.serve.http.service import HotRoute, Service, unless_gone
from tandem.serve.openai.requests import parse
from tandem.serve.openai.routes import ChatRenderer
from tandem.serve.openai.service import openai_service
from tandem.types import Completion, PlacedImage, Sampling

_LINES_PER_S = 500  # of all streams together; a line costs sender and receiver a third of a millisecond
_MIN_FLUSH_S, _MAX_FLUSH_S = 0.02, 2.0
_MAX_GENERATIONS, _MAX_URGENT = 16384, 16
_LATEST_S = 60.0  # that a request may allow its lines to be late
_MAX_LEASE_S, _MAX_DEADLINE_S = 3600.0, 3600.0


def engine_service(
    engine: LocalEngine,
    open_source: OpenSource,
    *,
    renderer: ChatRenderer,
    model_id: str,
    context: int,
    num_ids: int,
    allowed: Allowed | None = None,
) -> Service:
    """Build the service. `context`: most tokens of prompt and completion together. `num_ids`: size of the vocabulary.
    `allowed`: what links may name."""
    control = WeightControl(engine, open_source, allowed or Allowed())
    openai = openai_service(control, renderer, model_id=model_id, context=context, num_ids=num_ids)
    api = _EngineApi(control, context, num_ids)
    router = APIRouter()
    router.add_api_route("/engine/status", api.status, methods=["GET"])
    for name in ("attach", "sleep", "wake", "digest"):
        router.add_api_route(f"/engine/{name}", getattr(api, name), methods=["POST"])
    router.include_router(openai.router)
    hot = [HotRoute("/engine/generate", api.generate), HotRoute("/engine/load", api.load)]
    limits = {**openai.limits, "generations_at_a_time": _MAX_GENERATIONS, "lease_s": int(_MAX_LEASE_S)}
    return Service("tandem engine serve", router, limits, openai.registry, control.close, control.why_unfit, hot=hot)


# --- request bodies


class _EngineBody(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=2**22)]
Lease = Annotated[float, Field(gt=0, le=_MAX_LEASE_S)]
Version = Annotated[int, Field(ge=0, lt=2**53)]


class ImageBody(_EngineBody):
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the image's file, in the directory that the engine was started with (`--images`)."""
    offset: int = Field(ge=0, lt=2**31)
    grid: Annotated[list[Annotated[int, Field(ge=1, lt=2**16)]], Field(min_length=3, max_length=3)]
    length: int = Field(ge=1, lt=2**31)


class SamplingBody(_EngineBody):
    max_tokens: int = Field(default=256, ge=1, lt=2**31)
    temperature: float = Field(default=1.0, ge=0, le=1000)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    stop: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default=[], max_length=64)
    stop_ids: Ids = []
    seed: int = Field(default=0, ge=-(2**63), lt=2**64)
    urgent: bool = False
    share: str = Field(default="", max_length=256)
    told_within_s: float = Field(default=0.0, ge=0, le=_LATEST_S)
    """Lines of tokens may come this much later than sampled: for a caller that only needs to know that the engine
    lives."""
    images: list[ImageBody] = Field(default=[], max_length=1024)
    """Those of the prompt, in their order."""

    def sampling(self) -> Sampling:
        values = self.model_dump()
        images = tuple(PlacedImage.of_json(each) for each in values["images"])
        return Sampling(**values | {"stop": tuple(self.stop), "stop_ids": tuple(self.stop_ids), "images": images})


class GenerateBody(_EngineBody):
    prompt_ids: Ids
    sampling: SamplingBody = SamplingBody()
    session: str | None = Field(default=None, max_length=256)
    boot_id: str = Field(default="", max_length=128)
    """The boot id of the engine that is addressed; empty: any."""


class AttachBody(_EngineBody):
    link: dict[str, Any]
    lease_s: Lease = 60.0
    writing: bool = False
    owner: str = Field(default="", max_length=128)
    process: str = Field(default="", max_length=64, pattern=r"^(\d+:\d+)?$")


class CallerBody(_EngineBody):
    attachment: int = Field(ge=1)
    boot_id: str = Field(max_length=128)

    @property
    def caller(self) -> WeightCaller:
        return WeightCaller(self.attachment, self.boot_id)


class LoadBody(CallerBody):
    version: Version
    deadline_s: float = Field(default=60.0, gt=0, le=_MAX_DEADLINE_S)


class SleepBody(CallerBody):
    lease_s: Lease = 60.0
    writing: bool = False


class DigestBody(_EngineBody):
    version: Version


# --- the routes


class _EngineApi:
    def __init__(self, control: WeightControl, context: int, num_ids: int) -> None:
        self.control, self.context, self.num_ids = control, context, num_ids
        self.running = 0

    async def status(self) -> JSONResponse:
        return JSONResponse({**self.control.status(), "told_within_s": _LATEST_S})

    @speaks(GenerateBody, answers=(LINES,))
    async def generate(self, request: Request) -> Response:
        body = await parse(GenerateBody, request)
        if body.boot_id:
            self.control.check_boot(body.boot_id)
        sampling = body.sampling.sampling()
        self._check(body.prompt_ids, sampling)
        tokens = _Untold()
        answer = asyncio.ensure_future(
            self.control.generate(body.prompt_ids, sampling, session=body.session, on_token=tokens.add)
        )
        answer.add_done_callback(self._ended)
        self.running += 1
        return _Stream(answer, tokens, lambda: max(self._flush_s(), sampling.told_within_s), self._refused)

    @speaks(AttachBody)
    async def attach(self, request: Request) -> Response:
        body = await parse(AttachBody, request)
        return await self._typed(
            request,
            lambda: self.control.attach(
                body.link, lease_s=body.lease_s, writing=body.writing, owner=body.owner, process=body.process
            ),
        )

    @speaks(LoadBody)
    async def load(self, request: Request) -> Response:
        body = await parse(LoadBody, request)

        async def load() -> dict[str, Any]:
            return served_as_json(await self.control.load(body.caller, body.version, body.deadline_s))

        return await self._typed(request, load)

    @speaks(SleepBody)
    async def sleep(self, request: Request) -> Response:
        body = await parse(SleepBody, request)
        return await self._typed(
            request, lambda: self.control.sleep(body.caller, lease_s=body.lease_s, writing=body.writing)
        )

    @speaks(CallerBody)
    async def wake(self, request: Request) -> Response:
        body = await parse(CallerBody, request)
        return await self._typed(request, lambda: self.control.wake(body.caller))

    @speaks(DigestBody)
    async def digest(self, request: Request) -> Response:
        body = await parse(DigestBody, request)

        async def digest() -> dict[str, Any]:
            return served_as_json(await self.control.digest(body.version))

        return await self._typed(request, digest)

    async def _typed(self, request: Request, work: Callable[[], Any]) -> Response:
        """Do the work and answer with its result; cancel it if the client hangs up. Errors keep their class for the
        client."""
        try:
            return Response(encoded(await unless_gone(request, work()) or {}), media_type="application/json")
        except TandemError as error:
            raise typed(error) from error

    def _check(self, prompt_ids: list[int], sampling: Sampling) -> None:
        if not prompt_ids:
            raise RequestRefused(422, "an empty prompt; send at least one token", field="prompt_ids")
        if (largest := max(*prompt_ids, *sampling.stop_ids, 0)) >= self.num_ids:
            raise RequestRefused(422, f"id {largest} does not exist; ids end at {self.num_ids - 1}", field="prompt_ids")
        if sampling.images and (why := self.control.why_not(sampling)):
            raise RequestRefused(422, why, field="sampling.images")
        if len(prompt_ids) + sampling.max_tokens > self.context:
            raise RequestRefused(
                422,
                f"{len(prompt_ids)} prompt tokens and max_tokens = {sampling.max_tokens} exceed the context of "
                f"{self.context}; ask for fewer, or raise engine.max_context",
                field="sampling.max_tokens",
            )
        if self.running >= _MAX_GENERATIONS + (_MAX_URGENT if sampling.urgent else 0):
            raise RequestRefused(429, f"{self.running} generations are running; try again")

    def _ended(self, answer: asyncio.Future[Completion]) -> None:
        self.running -= 1
        if not answer.cancelled():
            answer.exception()  # retrieved, or asyncio warns

    def _refused(self, error: TandemError) -> RequestRefused:
        """Return the refusal of an error before the first token: a healthy engine refuses the request itself, so
        422."""
        refused = typed(error)
        of_request = refused.code == "engine" and self.control.state in ("serving", "paused")
        return RequestRefused(422, refused.message, code="engine") if of_request else refused

    def _flush_s(self) -> float:
        return min(max(self.running / _LINES_PER_S, _MIN_FLUSH_S), _MAX_FLUSH_S)


def typed(error: TandemError) -> RequestRefused:
    code = code_of(error)
    if isinstance(error, RequestRefused) or not code:
        return as_refused(error)
    return RequestRefused(409 if isinstance(error, SyncError) else 503, str(error), code=code)


# --- a completion as a stream


class _Untold:
    """Sampled tokens that were not sent yet, in runs of one version."""

    def __init__(self) -> None:
        self._runs: list[Tokens] = []

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, token_id: int, logprob: float, version: int) -> None:
        if not self._runs or self._runs[-1]["version"] != version:
            self._runs.append({"ids": [], "logprobs": [], "version": version})
        self._runs[-1]["ids"].append(token_id)
        self._runs[-1]["logprobs"].append(logprob)

    def take(self) -> bytes:
        runs, self._runs = self._runs, []
        return b"".join(map(line, runs))


class _Stream(Response):
    """Streams a completion. A StreamingResponse would cost a task group and two queues per line of each stream."""

    def __init__(
        self,
        answer: asyncio.Future[Completion],
        tokens: _Untold,
        flush_s: Callable[[], float],
        refused: Callable[[TandemError], RequestRefused],
    ) -> None:
        super().__init__(media_type="application/x-ndjson", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._answer, self._tokens, self._flush_s, self._refused = answer, tokens, flush_s, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await self._news(gone)
            while not (self._tokens or self._answer.done() or gone.done()):  # the status is not known before
                await self._news(gone)
            if self._answer.done() and (error := _error_of(self._answer)) is not None:
                return await refusal(self._refused(error), scope)(scope, receive, send)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not (self._answer.done() or gone.done()):
                if lines := self._tokens.take():
                    await send({"type": "http.response.body", "body": lines, "more_body": True})
                await self._news(gone)
            if self._answer.done():
                await send({"type": "http.response.body", "body": self._tokens.take() + self._last_line()})
        finally:
            gone.cancel()
            self._answer.cancel()

    async def _news(self, gone: asyncio.Future[None]) -> None:
        await asyncio.wait((self._answer, gone), timeout=self._flush_s(), return_when=asyncio.FIRST_COMPLETED)

    def _last_line(self) -> bytes:
        if (error := _error_of(self._answer)) is not None:
            return line(typed(error).body)
        completion = self._answer.result()
        spans = [[span.version, span.count] for span in completion.spans]
        return line(StreamEnd(finish_reason=completion.finish_reason, spans=spans))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_of(answer: asyncio.Future[Completion]) -> TandemError | None:
    error = EngineError("engine: the generation was cancelled") if answer.cancelled() else answer.exception()
    if error is None or isinstance(error, TandemError):
        return error
    raise error
