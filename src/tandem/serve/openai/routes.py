"""OpenAI's `/v1/models`, `/v1/chat/completions` and `/v1/completions` over an Engine.

Beyond OpenAI: `top_k`, token ids in and out (`return_token_ids`), and the version of the weights behind every token.
A list of prompts has `n` choices per prompt, in order; sample i of each prompt has seed + i.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge

from tandem.errors import ImageError, StoreError, TandemError, TemplateError, TextTooLong
from tandem.io.chat_feedback import ChatStore
from tandem.protocols import OnToken, ScoringEngine, why_not_sampled
from tandem.serve.http.openapi_document import EVENTS, JSON, speaks
from tandem.serve.http.refusals import RequestRefused, as_refused
from tandem.serve.http.request_bounds import (
    AT_ONCE_BYTES,
    MAX_MESSAGES,
    MAX_N,
    MAX_PROMPTS,
    MAX_TOOLS_BYTES,
    MAX_VALUES,
)
from tandem.serve.http.service import aside, let_go, unless_gone
from tandem.serve.openai.answer_format import grammar_of
from tandem.serve.openai.choices import (
    CHAT,
    TEXT,
    Choice,
    ChoiceDelta,
    OpenedSamples,
    ResponseLayout,
    SampleJob,
    Speech,
    prompt_logprob,
    usage,
)
from tandem.serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    TemplateInput,
    conversation,
    parse,
    read,
)
from tandem.shapes.deployments import DEPLOYMENT_HEADER, DEPLOYMENT_NAME
from tandem.types import PLAIN, Completion, Message, Sampling

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""The tools of a conversation, as JSON schemas in OpenAI's form."""


T = TypeVar("T")

_log = logging.getLogger(__name__)

SESSION_HEADER = "X-Tandem-Session"
_NAME = re.compile(DEPLOYMENT_NAME)
DEFAULT_TOKENS = 4096
"""Default of max_tokens in a chat, if the context has room for so many."""


class Sampler(Protocol):
    """The Engine methods that answer requests."""

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


class ChatRenderer(Speech, Protocol):
    def within(self, context: int) -> Self: ...
    def encode(self, text: str) -> list[int]: ...
    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]: ...
    def with_options(self, options: Mapping[str, Any]) -> Self: ...  # for the chat template
    def options_of_effort(self, effort: str) -> Mapping[str, Any]: ...


class Conversations(Protocol):
    """Turns requests into prompts, and records the answers."""

    @property
    def records(self) -> bool: ...  # whether answers are kept for training
    async def chat(
        self, request: Request, messages: Sequence[Message], tools: Tools, n: int, renderer: ChatRenderer
    ) -> OpenedSamples: ...
    async def text(self, request: Request, prompts: Sequence[str | list[int]], n: int) -> OpenedSamples: ...


@dataclass(frozen=True)
class _StatelessTurn:
    prompt: list[int]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    session: str = ""

    def keep(self, completion: Completion, told: Message, sampling: Sampling) -> None:
        pass


@dataclass(frozen=True)
class Stateless:
    """Conversations that are not recorded: each request stands alone."""

    renderer: ChatRenderer
    records: bool = False

    async def chat(
        self, request: Request, messages: Sequence[Message], tools: Tools, n: int, renderer: ChatRenderer
    ) -> OpenedSamples:
        prompt = await aside(request)(renderer.prompt, messages, tools)  # always on a thread: a template may loop
        return OpenedSamples([_StatelessTurn(prompt) for _ in range(n)])

    async def text(self, request: Request, prompts: Sequence[str | list[int]], n: int) -> OpenedSamples:
        ids = [
            await encoded(request, prompts, partial(self.renderer.encode, prompt))
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        return OpenedSamples([_StatelessTurn(prompt) for prompt in ids for _ in range(n)])


async def encoded(request: Request, prompts: Sequence[str | list[int]], encode: Callable[[], T]) -> T:
    """Return `encode()` of one of the prompts; on a thread if all prompts together are large."""
    if sum(map(len, prompts)) <= AT_ONCE_BYTES:
        return encode()
    return await aside(request)(encode)


class _Books:
    def __init__(self, engine: Sampler) -> None:
        self.registry = registry = CollectorRegistry()
        self.prompt_tokens = Counter("tandem_prompt_tokens", "Prompt tokens received.", registry=registry)
        self.sampled_tokens = Counter("tandem_sampled_tokens", "Tokens sampled and delivered.", registry=registry)
        self.cancelled = Counter("tandem_samples_cancelled", "Samples whose client hung up.", registry=registry)
        self.not_kept = Counter("tandem_chats_not_kept", "Chats that the disk did not take.", registry=registry)
        self.running = Gauge("tandem_samples_running", "Samples that are running.", registry=registry)
        version = Gauge("tandem_weight_version", "The version of the weights that is served.", registry=registry)
        version.set_function(lambda: engine.version)


# --- the routes


@dataclass
class OpenAi:
    engine: Sampler
    renderer: ChatRenderer
    conversations: Conversations
    model_id: str
    context: int
    num_ids: int
    max_requests: int = 4096
    on_update: frozenset[str] = frozenset()
    """The values of `on_update` that a request may choose."""
    chats: ChatStore | None = None
    """Keeps chats for feedback."""
    adapters: Mapping[str, Sampler] = field(default_factory=dict[str, Sampler])
    """Further models by their names: adapters over the engine's base. It may change between two requests."""
    running: int = 0
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.books = _Books(self.engine)

    def router(self, prefix: str) -> APIRouter:
        router = APIRouter(prefix=prefix)
        router.add_api_route("/models", self.models, methods=["GET"])
        router.add_api_route("/models/{name:path}", self.model, methods=["GET"])
        router.add_api_route("/chat/completions", self.chat, methods=["POST"])
        router.add_api_route("/completions", self.complete, methods=["POST"])
        return router

    @property
    def limits(self) -> dict[str, int]:
        return {
            "context_tokens": self.context, "default_tokens": DEFAULT_TOKENS, "n": MAX_N, "prompts": MAX_PROMPTS,
            "messages": MAX_MESSAGES, "tools_bytes": MAX_TOOLS_BYTES, "values": MAX_VALUES,
            "samples_at_a_time": self.max_requests,
        }  # fmt: skip

    async def models(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, name: str) -> JSONResponse:
        self._check_model(name)
        return JSONResponse(self._model(name))

    @speaks(ChatRequest, answers=(JSON, EVENTS))
    async def chat(self, request: Request) -> Response:
        given = await read(request, conversation)
        return await self._answer(request, await self.chat_job(request, given), CHAT)

    async def chat_job(self, request: Request, given: TemplateInput, *, keep: bool = True) -> SampleJob:
        """Return what to sample for a chat. RequestRefused if it cannot be answered. `keep`: for feedback."""
        asked = given.asked
        self._check_model(asked.model)
        self._check_store(asked, self.chats)
        renderer = await self.renderer_for(request, asked)
        one_call = not asked.parallel_tool_calls
        grammar = grammar_of(
            asked.response_format.schema_of_answer if asked.response_format is not None else None,
            asked.tool_choice, given.tools,
            one_call=one_call, mark=partial(_mark, renderer), after=renderer.end_of_thought,
        )  # fmt: skip
        opening = self.conversations.chat(request, given.messages, given.tools, asked.n, renderer)
        opened = await self.opened("messages", opening)
        let_go(request)  # only now: its parsed body still takes the memory
        room = max(1, self.context - len(opened.places[0].prompt))
        max_tokens = asked.max_completion_tokens or asked.max_tokens or min(room, DEFAULT_TOKENS)
        calls = bool(asked.tools) and asked.tool_choice != "none"
        job = self._job(asked, opened, max_tokens, one_prompt=True, logprobs=asked.logprobs, calls=calls)
        shape = job.sampling.shape if grammar is None else replace(job.sampling.shape, grammar=grammar)
        sampling = replace(job.sampling, shape=shape, top_logprobs=asked.top_logprobs)
        job = replace(job, sampling=sampling, one_call=one_call, speech=renderer)
        if self.chats is not None and keep and asked.store is not False:
            job = replace(job, messages=given.messages, tools=bool(given.tools))
        await self.check(request, job, "messages")
        return job

    @speaks(CompletionRequest, answers=(JSON, EVENTS))
    async def complete(self, request: Request) -> Response:
        asked = await parse(CompletionRequest, request)
        self._check_model(asked.model)
        self._check_store(asked, None)
        if asked.prompt_logprobs is not None and not isinstance(self._sampler(asked.model), ScoringEngine):
            text = "prompt_logprobs: this engine gives no logprobs of given tokens; `tandem serve` does; leave it out"
            raise RequestRefused(422, text, field="prompt_logprobs")
        one_prompt = isinstance(asked.prompt, str) or isinstance(asked.prompt[0], int)
        given: Any = [asked.prompt] if one_prompt else asked.prompt
        self._check_load(asked.n * len(given))
        opened = await self.opened("prompt", self.conversations.text(request, given, asked.n))
        wanted = asked.logprobs is not None
        job = self._job(asked, opened, asked.max_tokens or 16, one_prompt=one_prompt, logprobs=wanted, calls=False)
        ranked = replace(job.sampling, top_logprobs=asked.logprobs or 0)
        if why_not_sampled(self.engine, replace(ranked, shape=PLAIN)):
            if asked.logprobs != 1:  # 1 may also mean: the sampled token's alone
                text = f"logprobs = {asked.logprobs}: this engine gives those of sampled tokens only; send 0 or 1"
                raise RequestRefused(422, text, field="logprobs")
            ranked = job.sampling
        job = replace(job, sampling=ranked, prompt_logprobs=asked.prompt_logprobs is not None)
        await self.check(request, job, "prompt")
        return await self._answer(request, job, TEXT)

    # --- from a request to a job

    async def opened(self, named: str, opening: Awaitable[T]) -> T:
        """Await the opening of a request's samples. `named`: the request's field with the prompts."""
        try:
            return await opening
        except (TextTooLong, ImageError) as error:
            code = "context_length_exceeded" if isinstance(error, TextTooLong) else ""
            raise RequestRefused(422, str(error), field=named, code=code) from error

    def _job(
        self, asked: ChatRequest | CompletionRequest, opened: OpenedSamples, max_tokens: int,
        *, one_prompt: bool, logprobs: bool, calls: bool,
    ) -> SampleJob:  # fmt: skip
        return SampleJob(
            opened, asked.n, asked.sampling(max_tokens), one_prompt,
            stream=asked.stream,
            include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
            logprobs=logprobs,
            token_ids=asked.return_token_ids,
            calls=calls,
            model=asked.model,
        )  # fmt: skip

    async def check(self, request: Request, job: SampleJob, named: str) -> None:
        """Raise RequestRefused if the job cannot be answered. `named`: the request's field with the prompts."""
        for prompt in job.prompts:
            self._check_prompt(prompt, job.sampling.max_tokens, named)
        self._check_on_update(job)
        self._check_load(len(job.opened.places))
        if job.sampling.extras:
            await self._check_extras(request, job.sampling)

    async def _check_extras(self, request: Request, sampling: Sampling) -> None:
        if outside := [id for id, _ in sampling.shape.logit_bias if id >= self.num_ids]:
            raise RequestRefused(422, f"{outside[0]} is no token id: 0 to {self.num_ids - 1}", field="logit_bias")
        if sampling.shape.engaged and self.conversations.records:
            name = sampling.shape.engaged[0]
            text = (
                f"{name}: this service records answers for training, and a trainer computes their logprobs without "
                f"{name}; leave it out, or ask a service that does not record (tandem serve)"
            )
            raise RequestRefused(422, text, field=name)
        # On a thread: a schema may take long to compile.
        if why := await aside(request)(why_not_sampled, self.engine, sampling):
            raise RequestRefused(422, why, field=why.partition(":")[0])

    async def renderer_for(self, request: Request, asked: ChatRequest) -> ChatRenderer:
        """Return the renderer with the request's options for the chat template."""
        options = dict(asked.chat_template_kwargs)
        field = "chat_template_kwargs" if options else "reasoning_effort"
        try:
            if asked.reasoning_effort is not None:
                options = {**self.renderer.options_of_effort(asked.reasoning_effort), **options}
            if not options:
                return self.renderer
            if self.conversations.records:
                text = f"{field}: this service records conversations, whose turns are all written with one template"
                raise RequestRefused(422, text, field=field)
            return await aside(request)(self.renderer.with_options, options)  # on a thread: a template may loop
        except TemplateError as error:
            raise RequestRefused(422, str(error), field=field) from error

    def _check_model(self, name: str) -> None:
        if name not in self._names:
            known = ", ".join(f"'{each}'" for each in self._names)
            raise RequestRefused(404, f"there is no model '{name}'; this service has {known}", field="model",
                          code="model_not_found")  # fmt: skip

    @property
    def _names(self) -> list[str]:
        return [self.model_id, *self.adapters]

    def _sampler(self, name: str) -> Sampler:
        return self.adapters.get(name, self.engine)

    def _check_store(self, asked: ChatRequest | CompletionRequest, chats: ChatStore | None) -> None:
        if asked.store and chats is None:
            text = "store = true: this is kept of chats only, and by a service with feedback; leave it out"
            raise RequestRefused(422, text, field="store")

    def _check_prompt(self, prompt: list[int], max_tokens: int, named: str) -> None:
        if not prompt:
            raise RequestRefused(422, f"{named} is empty; send at least one token", field=named)
        if not 0 <= min(prompt) <= max(prompt) < self.num_ids:
            raise RequestRefused(422, f"{named} has a token id outside 0 to {self.num_ids - 1}", field=named)
        if len(prompt) >= self.context:
            text = f"{named} has {len(prompt)} tokens, which leaves no room in a context of {self.context}"
            raise RequestRefused(422, text, field=named, code="context_length_exceeded")
        if len(prompt) + max_tokens > self.context:
            text = f"{len(prompt)} prompt tokens and max_tokens = {max_tokens} exceed the context of {self.context}"
            raise RequestRefused(422, text, field="max_tokens", code="context_length_exceeded")

    def _check_on_update(self, job: SampleJob) -> None:
        on_update = job.sampling.on_update
        if on_update and on_update not in self.on_update:
            known = f"takes {', '.join(sorted(self.on_update))}" if self.on_update else "takes none"
            raise RequestRefused(422, f"on_update = '{on_update}': this service {known}", field="on_update")
        if on_update == "restart" and job.stream:
            raise RequestRefused(422, "on_update = 'restart': streamed text cannot be taken back", field="on_update")

    def _check_load(self, wanted: int) -> None:
        if wanted > self.max_requests:
            text = f"prompts x n = {wanted} samples; one request may have at most {self.max_requests}"
            raise RequestRefused(422, text, field="n")
        if self.running + wanted > self.max_requests:
            raise RequestRefused(429, f"{self.running} samples are running, {self.max_requests} are allowed; try again")

    # --- from a job to an answer

    async def _answer(self, request: Request, job: SampleJob, layout: ResponseLayout) -> Response:
        if _NAME.fullmatch(behind := request.headers.get(DEPLOYMENT_HEADER, "")):
            job = replace(job, behind=behind)
        if job.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"} | self.headers(job)
            return StreamingResponse(self._chunks(job, layout), media_type="text/event-stream", headers=headers)
        choices = await self.whole(request, job, parts_thoughts=layout.parts_thoughts)
        version = max(choice.version for choice in choices)
        body = self._head(job, layout, layout.object, version)
        await self._keep(body["id"], job, choices)
        body["choices"] = [self._choice(choice.take(), job, layout) for choice in choices]
        if job.prompt_logprobs:
            for told, choice in zip(body["choices"], choices, strict=True):
                told["prompt_logprobs"] = choice.prompt_logprobs
        body["usage"] = usage(job, choices)
        if job.token_ids:
            body["prompt_token_ids"] = job.prompt_token_ids
        return JSONResponse(body, headers=self.headers(job))

    async def whole(self, request: Request, job: SampleJob, *, parts_thoughts: bool) -> list[Choice]:
        """Return all choices once they are complete."""
        choices = self.choices(job, parts_thoughts=parts_thoughts)

        async def play() -> None:
            async for _ in self.play(job, choices):
                pass
            if job.prompt_logprobs:
                for number, prompt in enumerate(job.prompts):
                    scored = await self._scored(prompt)
                    for choice in choices[number * job.n : (number + 1) * job.n]:
                        choice.prompt_logprobs = scored

        await unless_gone(request, play())
        return choices

    async def _scored(self, prompt: list[int]) -> list[dict[str, Any] | None]:
        """Return the logprobs of a prompt's tokens, in vLLM's form."""
        assert isinstance(self.engine, ScoringEngine), "checked before"
        found = await self.engine.score(prompt)
        return [None, *(prompt_logprob(self.renderer, *each) for each in zip(prompt[1:], found, strict=True))]

    async def _chunks(self, job: SampleJob, layout: ResponseLayout) -> AsyncIterator[str]:
        choices = self.choices(job, parts_thoughts=layout.parts_thoughts)
        head = self._head(job, layout, layout.chunk_object, self._sampler(job.model).version)
        extra: dict[str, Any] = {"usage": None} if job.include_usage else {}
        first: dict[str, Any] = {"prompt_token_ids": job.prompt_token_ids} if job.token_ids else {}

        def chunk(choice: Choice) -> str:
            body = {**head, **first, "choices": [self._choice(choice.take(), job, layout)], **extra}
            first.clear()
            return _event(body)

        for choice in choices if layout.greets else ():
            yield chunk(choice)
        unfinished = len(choices)
        try:
            async for choice in self.play(job, choices):
                head["weight_version"] = choice.version
                unfinished -= choice.piece.finish_reason is not None
                if not unfinished:  # before the last chunk: a client may hang up after it
                    await self._keep(head["id"], job, choices)
                yield chunk(choice)
        except TandemError as error:  # the status line was sent, so the failure is sent as an event
            yield _event(as_refused(error).openai[1])
            return
        if job.include_usage:
            yield _event({**head, "choices": [], "usage": usage(job, choices)})
        yield "data: [DONE]\n\n"

    async def _keep(self, id: str, job: SampleJob, choices: Sequence[Choice]) -> None:
        """Keep a chat for feedback. If the disk fails, the client gets its answer all the same."""
        if self.chats is None or not job.messages:
            return
        answers, version = [choice.told for choice in choices], max(choice.version for choice in choices)
        try:
            await self.chats.keep(id, job.messages, answers, version, tools=job.tools)
        except StoreError as error:
            self.books.not_kept.inc()
            _log.error("chat %s is not kept: %s", id, error)

    async def play(self, job: SampleJob, choices: list[Choice]) -> AsyncIterator[Choice]:
        """Sample all choices at once; yield a choice whenever it has new text and when it is complete."""
        news: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        tasks: list[asyncio.Task[Completion]] = []
        self.books.prompt_tokens.inc(sum(map(len, job.prompts)))
        sampler = self._sampler(job.model)
        with job.opened.under_way():
            for index, (place, sampling) in enumerate(job.samples):
                on_token = partial(_put_token, news, index) if job.stream else None
                sampled = sampler.generate(place.prompt, sampling, session=place.session or None, on_token=on_token)
                task = asyncio.create_task(sampled)
                task.add_done_callback(partial(_put_end, news, index))
                tasks.append(task)
            left = len(tasks)
            self._count(left)
            try:
                while left:
                    index, event = await news.get()
                    choice = choices[index]
                    if isinstance(event, tuple):
                        token_id, logprob, version, *ranked = event
                        choice.add([token_id], [logprob], version, ranked)
                    else:
                        choice.finish(event.result())
                        left -= 1
                    piece = choice.piece
                    if piece.text or piece.thought or piece.calls or piece.finish_reason:
                        yield choice
            finally:
                self._count(-len(tasks))
                self.books.sampled_tokens.inc(sum(choice.num_tokens for choice in choices))
                self.books.cancelled.inc(sum(task.cancel() for task in tasks))

    def choices(self, job: SampleJob, *, parts_thoughts: bool) -> list[Choice]:
        places = range(len(job.opened.places))
        speech = job.speech or self.renderer
        return [Choice(index, speech, job, parts_thoughts=parts_thoughts) for index in places]

    def _count(self, change: int) -> None:
        self.running += change
        self.books.running.set(self.running)

    # --- layout

    @staticmethod
    def headers(job: SampleJob) -> dict[str, str]:
        return {SESSION_HEADER: job.opened.session} if job.opened.session else {}

    def _head(self, job: SampleJob, layout: ResponseLayout, kind: str, version: int) -> dict[str, Any]:
        session = {"session_id": job.opened.session} if job.opened.session else {}
        name = job.behind or job.model or self.model_id
        # A deployment, NAME or NAME@N, is named in the ids of its answers, so that their feedback finds it.
        suffix = f".{name}" if job.behind or "@" in name else ""
        return {
            "id": layout.id_prefix + uuid.uuid4().hex + suffix,
            "object": kind,
            "created": int(time.time()),
            "model": name,
            "weight_version": version,
            **session,
        }

    def _choice(self, piece: ChoiceDelta, job: SampleJob, layout: ResponseLayout) -> dict[str, Any]:
        choice = layout.choice(piece, job, self.renderer)
        choice |= {"index": piece.index, "finish_reason": piece.finish_reason}
        if job.token_ids:
            choice["token_ids"] = piece.ids
        if (place := job.opened.places[piece.index]).session:
            choice |= {"session_id": place.session, "turn_id": place.id}
        if piece.finish_reason:
            choice["weight_versions"] = [[span.version, span.count] for span in piece.spans]
        return choice

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": self.started, "owned_by": "tandem",
            "max_model_len": self.context, "weight_version": self._sampler(name).version,
        }  # fmt: skip


def _mark(renderer: ChatRenderer, text: str) -> str:
    """Return how a grammar writes a mark, which is one token of most tokenizers that have it."""
    ids = renderer.encode(text)
    return f"<[{ids[0]}]>" if len(ids) == 1 else json.dumps(text)


def _put_token(news: asyncio.Queue[tuple[int, Any]], index: int, *token: Any) -> None:
    news.put_nowait((index, token))


def _put_end(news: asyncio.Queue[tuple[int, Any]], index: int, task: asyncio.Task[Completion]) -> None:
    if not task.cancelled():
        task.exception()  # retrieved, or asyncio warns: one failure is reported, not that of each sibling
    news.put_nowait((index, task))


def _event(body: dict[str, Any]) -> str:
    """Return a server-sent event in ASCII: some clients' languages break lines at U+0085 or U+2028."""
    return f"data: {json.dumps(body, allow_nan=False, separators=(',', ':'))}\n\n"
