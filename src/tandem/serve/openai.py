"""OpenAI's `/v1/models`, `/v1/chat/completions` and `/v1/completions` over an Engine.

Beyond OpenAI: `top_k`, token ids in and out (`return_token_ids`), and the version of the weights behind every token.
A list of prompts has `n` choices a prompt, in order; sample i of each is drawn with seed + i.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge

from tandem.errors import TandemError
from tandem.protocols import OnToken
from tandem.serve.app import Refused, Service, as_refused, unless_gone
from tandem.serve.openai_request import MAX_N, MAX_PROMPTS, ChatRequest, CompletionRequest, parse
from tandem.serve.text_stream import TextStream, TokenNames, token_bytes
from tandem.types import Completion, FinishReason, Message, Sampling, Span

_LEAST_LOGPROB = -9999.0  # JSON has no -inf


class Thoughts(Protocol):
    def push(self, text: str) -> tuple[str, str]: ...  # new thought, new answer
    def close(self) -> tuple[str, str]: ...


class Sampler(Protocol):
    """What of an Engine answers requests."""

    @property
    def version(self) -> int: ...
    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion: ...
    async def close(self) -> None: ...


class Renderer(TokenNames, Protocol):
    @property
    def end_ids(self) -> frozenset[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def prompt(self, messages: Sequence[Message]) -> list[int]: ...
    def thoughts(self) -> Thoughts: ...


def openai_service(
    engine: Sampler, renderer: Renderer, *, model_id: str, context: int, num_ids: int, max_requests: int = 4096
) -> Service:
    """`context`: prompt and completion together. `num_ids`: ids below it exist. `max_requests`: samples at a time."""
    registry = CollectorRegistry()
    api = _Api(engine, renderer, model_id, context, num_ids, max_requests, _Books(registry, engine))
    router = APIRouter(prefix="/v1")
    router.add_api_route("/models", api.models, methods=["GET"])
    router.add_api_route("/models/{name:path}", api.model, methods=["GET"])
    router.add_api_route("/chat/completions", api.chat, methods=["POST"])
    router.add_api_route("/completions", api.complete, methods=["POST"])
    limits = {"context_tokens": context, "n": MAX_N, "prompts": MAX_PROMPTS, "samples_at_a_time": max_requests}
    return Service("tandem serve", router, limits, registry, engine.close)


class _Books:
    def __init__(self, registry: CollectorRegistry, engine: Sampler) -> None:
        self.prompt_tokens = Counter("tandem_prompt_tokens", "Prompt tokens taken in.", registry=registry)
        self.sampled_tokens = Counter("tandem_sampled_tokens", "Tokens sampled and delivered.", registry=registry)
        self.cancelled = Counter("tandem_samples_cancelled", "Samples whose client hung up.", registry=registry)
        self.running = Gauge("tandem_samples_running", "Samples under way.", registry=registry)
        version = Gauge("tandem_weight_version", "The version of the weights that is served.", registry=registry)
        version.set_function(lambda: engine.version)


# --- one request, and its choices as they grow


@dataclass(frozen=True)
class _Job:
    prompts: list[list[int]]
    one_prompt: bool
    """Sent as one, not as a list of one: its ids are then answered as one list."""
    n: int
    sampling: Sampling
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool

    @property
    def samples(self) -> list[tuple[list[int], Sampling]]:
        sampling = self.sampling
        return [(prompt, replace(sampling, seed=sampling.seed + i)) for prompt in self.prompts for i in range(self.n)]

    @property
    def prompt_token_ids(self) -> list[int] | list[list[int]]:
        return self.prompts[0] if self.one_prompt else self.prompts


@dataclass
class _Piece:
    """What a choice has to say since it was last asked; without streaming, all of it."""

    index: int
    opens: bool
    text: str = ""
    thought: str = ""
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    offsets: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    spans: list[Span] = field(default_factory=list[Span])


class _Choice:
    def __init__(self, index: int, renderer: Renderer, job: _Job, *, parts_thoughts: bool) -> None:
        self.version, self.num_tokens = -1, 0
        self._end_ids, self._offsets_wanted = renderer.end_ids.union(job.sampling.stop_ids), job.logprobs
        self._text = TextStream(renderer.decode, job.sampling.stop)
        self._thoughts = renderer.thoughts() if parts_thoughts else None
        self.piece = _Piece(index, opens=True)

    def add(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        piece, self.version = self.piece, version
        self.num_tokens += len(ids)
        piece.ids += ids
        piece.logprobs += (max(logprob, _LEAST_LOGPROB) for logprob in logprobs)
        # Where a token begins (or the character that it goes on with) is known only if tokens are decoded one by one.
        for part in [[token_id] for token_id in ids] if self._offsets_wanted else [ids]:
            piece.offsets.append(self._text.num_chars)
            self._tell(self._text.push([token_id for token_id in part if token_id not in self._end_ids]))

    def finish(self, completion: Completion) -> None:
        rest = slice(self.num_tokens, None)
        if completion.ids[rest]:
            self.add(completion.ids[rest], completion.logprobs[rest], completion.spans[-1].version)
        self._tell(self._text.close(), last=True)
        self.piece.finish_reason = "stop" if self._text.stopped else completion.finish_reason
        self.piece.spans = completion.spans

    def _tell(self, text: str, *, last: bool = False) -> None:
        if self._thoughts is None:
            self.piece.text += text
            return
        for thought, answer in (self._thoughts.push(text), *([self._thoughts.close()] if last else [])):
            self.piece.thought += thought
            self.piece.text += answer

    def take(self) -> _Piece:
        piece, self.piece = self.piece, _Piece(self.piece.index, opens=False)
        return piece


# --- the two layouts: a piece as a choice of the answer, or of a chunk of it


@dataclass(frozen=True)
class _Layout:
    object: str
    chunk_object: str
    id_prefix: str
    greets: bool
    """A stream opens with an empty chunk for each choice, in order: clients make room for choices as they come."""
    parts_thoughts: bool
    """Thoughts are told apart from the answer, as `reasoning_content`."""
    choice: Callable[[_Piece, _Job, TokenNames], dict[str, Any]]


def _chat_choice(piece: _Piece, job: _Job, names: TokenNames) -> dict[str, Any]:
    role = {"role": "assistant"} if piece.opens else {}
    logprobs: dict[str, Any] | None = None
    if job.logprobs:
        entries = [_chat_logprob(names, *entry) for entry in zip(piece.ids, piece.logprobs, strict=True)]
        logprobs = {"content": entries, "refusal": None}
    thought = {"reasoning_content": piece.thought} if piece.thought else {}
    return {"delta" if job.stream else "message": {**role, "content": piece.text, **thought}, "logprobs": logprobs}


def _chat_logprob(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    raw = token_bytes(names, token_id)
    return {
        "token": _token_name(names, token_id),
        "logprob": logprob,
        "bytes": None if raw is None else list(raw),
        "top_logprobs": [],
    }


def _token_name(names: TokenNames, token_id: int) -> str:
    raw = token_bytes(names, token_id)
    return names.token_text(token_id) if raw is None else raw.decode("utf-8", "replace")


def _text_choice(piece: _Piece, job: _Job, names: TokenNames) -> dict[str, Any]:
    logprobs = {
        "tokens": [_token_name(names, token_id) for token_id in piece.ids],
        "token_logprobs": piece.logprobs,
        "text_offset": piece.offsets,
        "top_logprobs": None,
    }
    return {"text": piece.text, "logprobs": logprobs if job.logprobs else None}


_CHAT = _Layout("chat.completion", "chat.completion.chunk", "chatcmpl-", True, True, _chat_choice)
_TEXT = _Layout("text_completion", "text_completion", "cmpl-", False, False, _text_choice)


# --- the routes


@dataclass
class _Api:
    engine: Sampler
    renderer: Renderer
    model_id: str
    context: int
    num_ids: int
    max_requests: int
    books: _Books
    running: int = 0
    started: int = field(default_factory=lambda: int(time.time()))

    async def models(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> JSONResponse:
        self._check_model(name)
        return JSONResponse(self._model())

    async def chat(self, request: Request) -> Response:
        asked = await parse(ChatRequest, request)
        self._check_model(asked.model)
        prompt = self.renderer.prompt([message.model_dump(exclude_none=True) for message in asked.messages])
        room = max(1, self.context - len(prompt))
        max_tokens = asked.max_completion_tokens or asked.max_tokens or room
        job = self._job(asked, [prompt], max_tokens, one_prompt=True, logprobs=asked.logprobs, named="messages")
        return await self._answer(request, job, _CHAT)

    async def complete(self, request: Request) -> Response:
        asked = await parse(CompletionRequest, request)
        self._check_model(asked.model)
        one_prompt = isinstance(asked.prompt, str) or isinstance(asked.prompt[0], int)
        given: Any = [asked.prompt] if one_prompt else asked.prompt
        prompts = [self.renderer.encode(item) if isinstance(item, str) else item for item in given]
        wanted = asked.logprobs is not None
        job = self._job(asked, prompts, asked.max_tokens or 16, one_prompt=one_prompt, logprobs=wanted, named="prompt")
        return await self._answer(request, job, _TEXT)

    # --- from a request to a job

    def _job(
        self, asked: ChatRequest | CompletionRequest, prompts: list[list[int]], max_tokens: int,
        *, one_prompt: bool, logprobs: bool, named: str,
    ) -> _Job:  # fmt: skip
        for prompt in prompts:
            self._check_prompt(prompt, max_tokens, named)
        seed = secrets.randbits(48) if asked.seed is None else asked.seed
        sampling = Sampling(
            max_tokens, asked.temperature, asked.top_p, asked.top_k, stop=tuple(asked.stop),
            stop_ids=tuple(asked.stop_token_ids), seed=seed,
        )  # fmt: skip
        job = _Job(
            prompts, one_prompt, asked.n, sampling,
            stream=asked.stream,
            include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
            logprobs=logprobs,
            token_ids=asked.return_token_ids,
        )  # fmt: skip
        self._check_load(len(prompts) * asked.n)
        return job

    def _check_model(self, name: str) -> None:
        if name != self.model_id:
            raise Refused(404, f"there is no model '{name}'; this service has '{self.model_id}'", field="model",
                          code="model_not_found")  # fmt: skip

    def _check_prompt(self, prompt: list[int], max_tokens: int, named: str) -> None:
        if not prompt:
            raise Refused(422, f"{named} is empty; the first token needs something to follow", field=named)
        if not 0 <= min(prompt) <= max(prompt) < self.num_ids:
            raise Refused(422, f"{named} has a token id outside 0 to {self.num_ids - 1}", field=named)
        if len(prompt) >= self.context:
            text = f"{named} has {len(prompt)} tokens, which leaves no room in a context of {self.context}"
            raise Refused(422, text, field=named, code="context_length_exceeded")
        if len(prompt) + max_tokens > self.context:
            text = f"{len(prompt)} prompt tokens and max_tokens = {max_tokens} exceed the context of {self.context}"
            raise Refused(422, text, field="max_tokens", code="context_length_exceeded")

    def _check_load(self, wanted: int) -> None:
        if wanted > self.max_requests:
            text = f"prompts x n = {wanted} samples; one request may ask for {self.max_requests}"
            raise Refused(422, text, field="n")
        if self.running + wanted > self.max_requests:
            raise Refused(429, f"{self.running} samples are under way, {self.max_requests} are allowed; try again")

    # --- from a job to an answer

    async def _answer(self, request: Request, job: _Job, layout: _Layout) -> Response:
        self.books.prompt_tokens.inc(sum(map(len, job.prompts)))
        if job.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(self._chunks(job, layout), media_type="text/event-stream", headers=headers)
        choices = self._choices(job, layout)

        async def play() -> None:
            async for _ in self._play(job, choices):
                pass

        await unless_gone(request, play())
        version = max(choice.version for choice in choices)
        body = self._head(layout, layout.object, version)
        body["choices"] = [self._choice(choice.take(), job, layout) for choice in choices]
        body["usage"] = _usage(job, choices)
        if job.token_ids:
            body["prompt_token_ids"] = job.prompt_token_ids
        return JSONResponse(body)

    async def _chunks(self, job: _Job, layout: _Layout) -> AsyncIterator[str]:
        choices = self._choices(job, layout)
        head = self._head(layout, layout.chunk_object, self.engine.version)
        extra: dict[str, Any] = {"usage": None} if job.include_usage else {}
        first: dict[str, Any] = {"prompt_token_ids": job.prompt_token_ids} if job.token_ids else {}

        def chunk(choice: _Choice) -> str:
            body = {**head, **first, "choices": [self._choice(choice.take(), job, layout)], **extra}
            first.clear()
            return _event(body)

        for choice in choices if layout.greets else ():
            yield chunk(choice)
        try:
            async for choice in self._play(job, choices):
                head["weight_version"] = choice.version
                yield chunk(choice)
        except TandemError as error:  # the status line is out: the failure travels as an event
            yield _event(as_refused(error).body)
            return
        if job.include_usage:
            yield _event({**head, "choices": [], "usage": _usage(job, choices)})
        yield "data: [DONE]\n\n"

    async def _play(self, job: _Job, choices: list[_Choice]) -> AsyncIterator[_Choice]:
        """Samples all choices at once; yields one whenever it has new text, and when it is complete."""
        news: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        tasks: list[asyncio.Task[Completion]] = []
        for index, (prompt, sampling) in enumerate(job.samples):
            on_token = partial(_put_token, news, index) if job.stream else None
            task = asyncio.create_task(self.engine.generate(prompt, sampling, on_token=on_token))
            task.add_done_callback(partial(_put_end, news, index))
            tasks.append(task)
        left = len(tasks)
        self._count(left)
        try:
            while left:
                index, event = await news.get()
                choice = choices[index]
                if isinstance(event, tuple):
                    token_id, logprob, version = event
                    choice.add([token_id], [logprob], version)
                else:
                    choice.finish(event.result())
                    left -= 1
                if choice.piece.text or choice.piece.thought or choice.piece.finish_reason:
                    yield choice
        finally:
            self._count(-len(tasks))
            self.books.sampled_tokens.inc(sum(choice.num_tokens for choice in choices))
            self.books.cancelled.inc(sum(task.cancel() for task in tasks))

    def _choices(self, job: _Job, layout: _Layout) -> list[_Choice]:
        count, parts = len(job.prompts) * job.n, layout.parts_thoughts
        return [_Choice(index, self.renderer, job, parts_thoughts=parts) for index in range(count)]

    def _count(self, change: int) -> None:
        self.running += change
        self.books.running.set(self.running)

    # --- layout

    def _head(self, layout: _Layout, kind: str, version: int) -> dict[str, Any]:
        return {
            "id": layout.id_prefix + uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": self.model_id,
            "weight_version": version,
        }

    def _choice(self, piece: _Piece, job: _Job, layout: _Layout) -> dict[str, Any]:
        choice = layout.choice(piece, job, self.renderer)
        choice |= {"index": piece.index, "finish_reason": piece.finish_reason}
        if job.token_ids:
            choice["token_ids"] = piece.ids
        if piece.finish_reason:
            choice["weight_versions"] = [[span.version, span.count] for span in piece.spans]
        return choice

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.model_id, "object": "model", "created": self.started, "owned_by": "tandem",
            "max_model_len": self.context, "weight_version": self.engine.version,
        }  # fmt: skip


def _put_token(news: asyncio.Queue[tuple[int, Any]], index: int, token_id: int, logprob: float, version: int) -> None:
    news.put_nowait((index, (token_id, logprob, version)))


def _put_end(news: asyncio.Queue[tuple[int, Any]], index: int, task: asyncio.Task[Completion]) -> None:
    if not task.cancelled():
        task.exception()  # seen: one failure is reported, the same one of 63 siblings need not be
    news.put_nowait((index, task))


def _usage(job: _Job, choices: Sequence[_Choice]) -> dict[str, int]:
    prompt, sampled = sum(map(len, job.prompts)), sum(choice.num_tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"
