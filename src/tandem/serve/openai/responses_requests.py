"""The body of `POST /v1/responses`, and the chat request that means the same."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.request_bounds import MAX_MESSAGES
from tandem.serve.openai.requests import MAX_RANKED, TemplateInput, checked, conversation
from tandem.serve.openai.strict import Strict

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text")
_KEEPS_NOTHING = "this service keeps no responses: send the whole conversation as input"

# Values without effect. Any other value is refused: the sentence says why.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "responses are answered at once; leave it out"),
    "conversation": ((), _KEEPS_NOTHING),
    "max_tool_calls": ((), "this service runs no tools itself; leave it out"),
    "previous_response_id": ((), _KEEPS_NOTHING),
    "prompt": ((), "this service keeps no prompts; send it as instructions and input"),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "store": ((False,), "this service keeps no responses; send false"),
    "stream_options": (({}, {"include_obfuscation": False}), "include_obfuscation is all it may have, and false"),
    "truncation": (("disabled",), "this service never drops a part of the input; send 'disabled'"),
}


def _included(include: Any) -> Any:
    """`reasoning.encrypted_content` changes nothing: thoughts come in plain text."""
    known = (_LOGPROBS, "reasoning.encrypted_content")
    if isinstance(include, list) and (strange := [each for each in include if each not in known]):
        raise ValueError(f"'{strange[0]}' is not supported; this service has {', '.join(known)}")
    return include


class FormatOfText(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    of_answer: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool = False


class TextOptions(Strict):
    format: FormatOfText = Field(default_factory=lambda: FormatOfText.model_validate({}))
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponsesRequest(Strict):
    model: str
    input: str | list[dict[str, Any]] = Field(min_length=1, max_length=2**24)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    top_logprobs: int = Field(0, ge=0, le=MAX_RANKED)
    include: Annotated[list[str], BeforeValidator(_included)] = Field([])
    text: TextOptions = Field(default_factory=lambda: TextOptions.model_validate({}))
    reasoning: Reasoning = Reasoning()
    tools: list[dict[str, Any]] = Field([])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    metadata: dict[str, str] = Field({})

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_kept(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (values, why) in _NEUTRAL.items():
            if data.get(name) is not None and data[name] not in values:
                raise ValueError(f"{name}: {why}")
        return {key: value for key, value in data.items() if key not in _NEUTRAL}

    @property
    def logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in self.include


def as_chat(data: Any) -> tuple[ResponsesRequest, TemplateInput]:
    """Return the request, and the chat that means the same."""
    asked = checked(ResponsesRequest, data)
    messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    elif len(asked.input) > MAX_MESSAGES:
        raise RequestRefused(422, f"at most {MAX_MESSAGES} items", field="input")
    else:
        for number, item in enumerate(asked.input):
            _add(messages, item, f"input.{number}")
    named = asked.text.format
    form: dict[str, Any] = {"type": named.type}
    if named.type == "json_schema":
        form["json_schema"] = {"name": named.name, "schema": named.of_answer, "strict": named.strict}
    chat = {
        "model": asked.model, "messages": messages, "stream": asked.stream, "temperature": asked.temperature,
        "top_p": asked.top_p, "top_k": asked.top_k, "seed": asked.seed, "max_tokens": asked.max_output_tokens,
        "logprobs": asked.logprobs, "top_logprobs": asked.top_logprobs, "response_format": form,
        "reasoning_effort": asked.reasoning.effort, "tools": [_tool(tool) for tool in asked.tools],
        "tool_choice": _choice(asked.tool_choice), "parallel_tool_calls": asked.parallel_tool_calls,
        "user": asked.user, "safety_identifier": asked.safety_identifier,
    }  # fmt: skip
    with named_as_here():
        return asked, conversation(chat)


_NAMES = {
    "messages": "input", "response_format": "text.format", "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
}  # fmt: skip


@contextmanager
def named_as_here() -> Generator[None]:
    """Refuse a chat by the names that its fields have here."""
    try:
        yield
    except RequestRefused as refused:
        name = refused.field.partition(".")[0]
        refused.field = _NAMES.get(name, refused.field)
        raise


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in a chat's form, which has its function by itself."""
    if tool.get("type") != "function":
        raise RequestRefused(
            422, f"type = '{tool.get('type')}': this service has no tools of its own; send functions", field="tools"
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _add(messages: list[dict[str, Any]], item: dict[str, Any], named: str) -> None:
    """Add what an item says. Calls belong to the assistant's message before them."""
    match item.get("type", "message"):
        case "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"), named)})
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            called = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(called)
        case "function_call_output":
            told = _text(item.get("output"), named)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": told})
        case "reasoning":
            pass  # templates leave out earlier thoughts
        case kind:
            raise RequestRefused(422, f"type = '{kind}': only messages and function calls are supported", field=named)


def _text(content: Any, named: str) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        if not (isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text"), str)):
            raise RequestRefused(422, "only parts with text are supported", field=f"{named}.content")
    return "".join(part["text"] for part in content)
