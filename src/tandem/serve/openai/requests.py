"""The requests of OpenAI clients. An unsupported option is refused by name, unless its value has no effect."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json, to_json

from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.request_bounds import (
    AT_ONCE_BYTES,
    MAX_MESSAGES,
    MAX_N,
    MAX_PROMPTS,
    MAX_TOOLS_BYTES,
    check_values,
)
from tandem.serve.http.service import aside, body_at_hand, let_go
from tandem.serve.openai.answer_format import ResponseFormat, ToolChoice
from tandem.serve.openai.strict import Strict
from tandem.types import PLAIN, Sampling, Shape

# Values without effect, which many clients send with every request. Any other value is refused as unknown.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "tools": ([],),
}


def _joined(content: Any) -> Any:
    """Return content as one text: text parts are joined, others (images, audio) are refused."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not (isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"):
            raise ValueError("only parts of the form {'type': 'text', 'text': ...} are supported")
    return "".join(part["text"] for part in content)


class CalledFunction(Strict):
    name: str
    arguments: str

    @property
    def for_template(self) -> dict[str, Any]:
        """Return the call for a chat template, which needs the arguments as an object, not as text."""
        try:
            arguments = from_json(self.arguments, allow_inf_nan=False) if self.arguments else {}
        except ValueError:
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class RequestToolCall(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int = 0
    """The number of the call in a stream; has no effect."""


class ToolFunction(Strict):
    name: str = Field(min_length=1, max_length=256)
    description: str = ""
    parameters: dict[str, Any] = Field({})
    strict: bool = False


MAX_RANKED = 20
"""Most of the likeliest tokens at each place of an answer."""


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` is OpenAI's newer name of `system`; templates know only that."""
    content: Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[dict[str, str]])] = ""
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[RequestToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if "content" not in self.model_fields_set and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        return self


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


def _stop_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Stop: TypeAlias = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16), BeforeValidator(_stop_list)
]


def _not_almost_zero(temperature: float) -> float:
    if 0 < temperature < 0.01:
        raise ValueError("must be 0 (greedy) or at least 0.01: dividing the logits by less overflows")
    return temperature


# What to send in place of options that clients know.
_INSTEAD = {
    "audio": "this service makes text only",
    "best_of": "send n, and choose",
    "echo": "put the prompt before the answer",
    "function_call": "send tool_choice",
    "functions": "send tools",
    "modalities": "this service makes text only",
    "prediction": "leave it out: it changes no answer",
    "service_tier": "there is one tier: leave it out",
    "suffix": "this service only continues texts",
    "web_search_options": "this service has no tools of its own: send functions as tools",
}

TokenId: TypeAlias = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""A token id as a key of a JSON object."""


class SamplingParams(Strict):
    """The sampling options of all supported request forms."""

    n: int = Field(1, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=1)
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_not_almost_zero)] = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=2**31 - 1)
    stop: Stop = Field([])
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=256)
    seed: int | None = Field(None, ge=0, le=2**53)
    on_update: Literal["follow", "pin", "restart"] | None = None
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=4096)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value not in _NEUTRAL.get(key, ())}

    @property
    def share(self) -> str:
        """The name of the share of the engine that the samples use; by default each request has its own share."""
        return uuid.uuid4().hex

    def sampling(self, max_tokens: int) -> Sampling:
        seed = secrets.randbits(48) if self.seed is None else self.seed
        return Sampling(
            max_tokens, self.temperature, self.top_p, self.top_k, stop=tuple(self.stop),
            stop_ids=tuple(self.stop_token_ids), seed=seed, on_update=self.on_update or "",
            share=self.share, shape=self.shape,
        )  # fmt: skip

    @property
    def shape(self) -> Shape:
        bias = tuple(sorted((int(id), value) for id, value in self.logit_bias.items() if value))
        shape = Shape(
            self.min_p, self.repetition_penalty, self.frequency_penalty, self.presence_penalty, logit_bias=bias
        )
        return PLAIN if shape == PLAIN else shape


class _RequestBase(SamplingParams):
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str = ""
    """Requests of one user share one share of the engine."""
    safety_identifier: str = ""
    """The newer name of `user`."""
    store: bool | None = None
    """false: the chat is not kept for feedback."""
    # Labels for the logs of a hosted service; accepted without effect.
    prompt_cache_key: str = ""
    metadata: dict[str, str] = Field({})

    @property
    def share(self) -> str:
        return (self.safety_identifier or self.user)[:256] or super().share

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> _RequestBase:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options without stream = true")
        return self


class ChatRequest(_RequestBase):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] = Field([], max_length=256)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    """false: the answer ends after its first call."""
    response_format: ResponseFormat | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_RANKED)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=64)
    """Variables for the model's chat template."""

    @model_validator(mode="after")
    def _ranked_with_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs without logprobs = true")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        return self


def prompt_list(prompt: Any) -> Any:
    """Check the shape of a prompt (text, ids, or a list of either), and return it unchanged."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return prompt
    several = isinstance(prompt, list) and 0 < len(prompt) <= MAX_PROMPTS
    if several and (all(isinstance(item, str) for item in prompt) or all(_is_ids(item) for item in prompt)):
        return prompt
    raise ValueError(f"must be a text, token ids, or a list of 1 to {MAX_PROMPTS} of either")


Prompts: TypeAlias = Annotated[
    str | list[int] | list[str] | list[list[int]],
    PlainValidator(prompt_list, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]


def _is_ids(value: Any) -> bool:
    if not (isinstance(value, list) and value and all(type(item) is int for item in value)):
        return False
    if not -(2**31) <= min(value) <= max(value) < 2**31:
        raise ValueError("has an invalid token id")
    return True


class CompletionRequest(_RequestBase):
    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=MAX_RANKED)
    """The sampled token's logprob, and those of so many of the likeliest tokens."""
    prompt_logprobs: int | None = Field(None, ge=0, le=1)
    """0 and 1 both return the logprob of each token of the prompt, at temperature 1; alternatives are not supported."""

    @model_validator(mode="after")
    def _whole_prompts(self) -> CompletionRequest:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs with stream = true: they come with a whole answer; leave stream out")
        return self


@dataclass(frozen=True)
class TemplateInput:
    """A chat request with its input for the chat template."""

    asked: ChatRequest
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def conversation(data: Any) -> TemplateInput:
    asked = checked(ChatRequest, data)
    tools = [tool.model_dump(exclude_unset=True) for tool in asked.tools]
    if tools and len(to_json(tools)) > MAX_TOOLS_BYTES:
        raise RequestRefused(
            422, f"all tools together may have at most {MAX_TOOLS_BYTES} bytes as JSON; send fewer", field="tools"
        )
    check_values("".join(_arguments(asked)).encode(), "messages")
    return TemplateInput(asked, [_for_template(message) for message in asked.messages], tools)


def _arguments(asked: ChatRequest) -> Iterator[str]:
    return (call.function.arguments for message in asked.messages for call in message.tool_calls or ())


def _for_template(given: ChatMessage) -> dict[str, Any]:
    message = given.model_dump(exclude_none=True)
    if given.role == "developer":
        message["role"] = "system"
    if given.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": call.type, "function": call.function.for_template} for call in given.tool_calls
        ]
    return message


R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


async def parse(kind: type[R], request: Request) -> R:
    """Parse and check the body, then free it."""
    parsed = await read(request, partial(checked, kind))
    let_go(request)
    return parsed


async def read(request: Request, work: Callable[[Any], T]) -> T:
    """Return `work` of the body's JSON; on a thread if the body is large."""
    raw = body_at_hand(request)
    if len(raw) <= AT_ONCE_BYTES:
        return work(_from_json(raw))
    return await aside(request)(lambda: work(_from_json(raw)))


async def read_if_any(kind: type[R], request: Request) -> R:
    """Read a body that may be left out, which means {}."""
    return await read(request, partial(checked, kind)) if body_at_hand(request) else checked(kind, {})


def _from_json(raw: bytes) -> Any:
    check_values(raw)
    # Not json.loads: this parser bounds nesting, and refuses NaN and half surrogate pairs, which tokenizers choke on.
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestRefused(422, f"the body is not JSON: {error}", code="invalid_json") from error


def checked(kind: type[R], data: Any, *, within: str = "") -> R:
    """Validate data. `within`: the field of the body that has it, for errors."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _as_refused(error, within) from error


def _as_refused(error: ValidationError, within: str) -> RequestRefused:
    first = error.errors(include_url=False, include_context=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    field = ".".join(str(part) for part in (*filter(None, [within]), *first["loc"]))
    if first["type"] == "extra_forbidden":
        instead = _INSTEAD.get(field, "leave it out")
        message = f"'{field}' is not supported by this service, or not with this value; {instead}"
    # Validators over several fields have no location; their text begins with the field's name.
    return RequestRefused(422, message, field=field or message.split()[0].rstrip(":"))
