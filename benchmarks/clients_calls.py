"""The calls of benchmarks/clients.py, made in the clients' own environment: `clients_calls.py URL [ONLY]`.

Prints a line of JSON for each call. The token is in the environment (THE_TOKEN).
"""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import instructor
import litellm
import openai
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL, TOKEN = sys.argv[1], os.environ["THE_TOKEN"]
BASE = f"{URL}/v1"
SAY = [{"role": "user", "content": "Say hello."}]
LONGEST_S = 300.0


class Sum(BaseModel):
    """Two numbers and a sign."""

    left: int = Field(ge=0, le=99)
    right: int = Field(ge=0, le=99)
    sign: Literal["plus", "minus"]


SCHEMA = Sum.model_json_schema() | {"additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "Sum", "schema": SCHEMA, "strict": True}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "add"}}
FLAT_TOOLS = [{"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}]

client = openai.OpenAI(base_url=BASE, api_key=TOKEN, max_retries=0, timeout=LONGEST_S)
MODEL = client.models.list().data[0].id
calls: list[tuple[str, str, str, Callable[[], Any]]] = []


def call(who: str, what: str, names: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a call. `names`: words one of which a refusal must have; empty: the call must work."""

    def add(made: Callable[[], Any]) -> Callable[[], Any]:
        calls.append((who, what, names, made))
        return made

    return add


def chat(**options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": SAY, "max_tokens": 8} | options)


def is_sum(text: str | None) -> None:
    Sum.model_validate_json(text or "")


def calls_add(message: Any) -> None:
    (made,) = message.tool_calls
    assert made.function.name == "add"
    is_sum(made.function.arguments)


# --- openai: models and chats


@call("openai", "models.list, models.retrieve")
def _() -> None:
    assert client.models.retrieve(MODEL).id == MODEL


@call("openai", "chat")
def _() -> None:
    answer = chat()
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens <= 8


@call("openai", "chat, async")
def _() -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=BASE, api_key=TOKEN, max_retries=0) as other:
            return await other.chat.completions.create(model=MODEL, messages=SAY, max_tokens=8)

    assert asyncio.run(ask()).choices[0].finish_reason in ("stop", "length")


@call("openai", "chat, stream with usage")
def _() -> None:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.total_tokens > 0


@call("openai", "chat, async stream")
def _() -> None:
    async def ask() -> int:
        async with openai.AsyncOpenAI(base_url=BASE, api_key=TOKEN, max_retries=0) as other:
            stream = await other.chat.completions.create(model=MODEL, messages=SAY, max_tokens=8, stream=True)
            return len([chunk async for chunk in stream])

    assert asyncio.run(ask()) > 1


@call("openai", "chat.completions.stream (helper)")
def _() -> None:
    with client.chat.completions.stream(model=MODEL, messages=SAY, max_tokens=8) as stream:
        assert any(event.type == "chunk" for event in stream)


@call("openai", "chat, with_raw_response")
def _() -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=SAY, max_tokens=4)
    assert raw.parse().choices


@call("openai", "chat, role developer")
def _() -> None:
    chat(messages=[{"role": "developer", "content": "Be short."}, *SAY])


@call("openai", "chat, content in parts")
def _() -> None:
    chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}])


@call("openai", "chat, an image", "image text parts")
def _() -> None:
    chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}])


@call("openai", "chat, n = 3 with a seed")
def _() -> None:
    one, other = ([choice.message.content for choice in chat(n=3, seed=5).choices] for _ in range(2))
    assert one == other
    assert len(one) == 3


@call("openai", "chat, stop")
def _() -> None:
    chat(stop=["\n", "."])


@call("openai", "chat, max_completion_tokens")
def _() -> None:
    chat(max_tokens=openai.omit, max_completion_tokens=4)


@call("openai", "chat, logprobs")
def _() -> None:
    assert all(each.logprob <= 0 for each in chat(logprobs=True).choices[0].logprobs.content)


@call("openai", "chat, top_logprobs = 5", "top_logprobs")
def _() -> None:
    for each in chat(logprobs=True, top_logprobs=5, temperature=0).choices[0].logprobs.content:
        assert len(each.top_logprobs) == 5
        assert max(other.logprob for other in each.top_logprobs) == each.logprob


@call("openai", "chat, top_logprobs in a stream", "top_logprobs")
def _() -> None:
    chunks = list(chat(logprobs=True, top_logprobs=2, stream=True))
    found = [each for chunk in chunks for each in (chunk.choices[0].logprobs or chunk.choices[0]).content or []]
    assert found
    assert all(len(each.top_logprobs) == 2 for each in found)


@call("openai", "chat, logit_bias", "logit_bias")
def _() -> None:
    told = chat(logit_bias={"65": 100}, temperature=0, extra_body={"return_token_ids": True})
    assert set(told.choices[0].token_ids) == {65}


@call("openai", "chat, frequency_penalty and presence_penalty", "penalty")
def _() -> None:
    chat(frequency_penalty=0.5, presence_penalty=0.5)


@call("openai", "chat, min_p and repetition_penalty", "min_p")
def _() -> None:
    chat(extra_body={"min_p": 0.1, "repetition_penalty": 1.2})


@call("openai", "chat, reasoning_effort", "reasoning_effort")
def _() -> None:
    chat(reasoning_effort="low")


@call("openai", "chat, chat_template_kwargs", "chat_template_kwargs")
def _() -> None:
    chat(extra_body={"chat_template_kwargs": {"enable_thinking": False}})


@call("openai", "chat, store = true", "store")
def _() -> None:
    chat(store=True)


@call("openai", "chat, metadata, user, service_tier")
def _() -> None:
    chat(metadata={"a": "b"}, user="me", service_tier="auto")


@call("openai", "chat, service_tier = priority", "service_tier")
def _() -> None:
    chat(service_tier="priority")


@call("openai", "chat, audio", "modalities audio")
def _() -> None:
    chat(modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})


@call("openai", "chat, prediction", "prediction")
def _() -> None:
    chat(prediction={"type": "content", "content": "hello"})


@call("openai", "chat, functions (old)", "functions")
def _() -> None:
    chat(functions=[TOOLS[0]["function"]])


# --- openai: formats and tools


@call("openai", "chat, response_format json_object", "response_format")
def _() -> None:
    found = chat(response_format={"type": "json_object"}, max_tokens=200).choices[0]
    assert found.finish_reason == "length" or isinstance(json.loads(found.message.content), dict)


@call("openai", "chat, response_format json_schema", "response_format")
def _() -> None:
    is_sum(chat(response_format=FORMAT, max_tokens=200).choices[0].message.content)


@call("openai", "chat, json_schema in a stream", "response_format")
def _() -> None:
    chunks = chat(response_format=FORMAT, max_tokens=200, stream=True)
    is_sum("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


@call("openai", "chat, json_schema with n = 4", "response_format")
def _() -> None:
    for choice in chat(response_format=FORMAT, max_tokens=200, n=4).choices:
        is_sum(choice.message.content)


@call("openai", "chat, a wrong schema", "response_format")
def _() -> None:
    chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objec"}}})
    raise AssertionError("it was taken")


@call("openai", "chat.completions.parse", "response_format")
def _() -> None:
    told = client.chat.completions.parse(model=MODEL, messages=SAY, response_format=Sum, max_tokens=200)
    assert isinstance(told.choices[0].message.parsed, Sum)


@call("openai", "chat.completions.stream with a format", "response_format")
def _() -> None:
    with client.chat.completions.stream(model=MODEL, messages=SAY, response_format=Sum, max_tokens=200) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Sum)


@call("openai", "chat, tools, auto", "tools")
def _() -> None:
    chat(tools=TOOLS)


@call("openai", "chat, tool_choice = required", "tools")
def _() -> None:
    told = chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    calls_add(told.choices[0].message)
    assert told.choices[0].finish_reason == "tool_calls"


@call("openai", "chat, a named tool", "tools")
def _() -> None:
    calls_add(chat(tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False, max_tokens=200).choices[0].message)


@call("openai", "chat, a named tool in a stream", "tools")
def _() -> None:
    options = {"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False, "max_tokens": 200}
    with client.chat.completions.stream(model=MODEL, messages=SAY, **options) as stream:
        calls_add(stream.get_final_completion().choices[0].message)


@call("openai", "chat, the answer of a tool", "tools")
def _() -> None:
    first = chat(tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False, max_tokens=200).choices[0].message
    answer = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
    chat(tools=TOOLS, messages=[*SAY, first, answer])


@call("openai", "parse with pydantic_function_tool", "tools")
def _() -> None:
    tool = openai.pydantic_function_tool(Sum)
    told = client.chat.completions.parse(
        model=MODEL, messages=SAY, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    assert isinstance(told.choices[0].message.tool_calls[0].function.parsed_arguments, Sum)  # pyright: ignore


# --- openai: completions, responses and others


@call("openai", "completions")
def _() -> None:
    assert client.completions.create(model=MODEL, prompt="Hello", max_tokens=4).choices


@call("openai", "completions, stream, list of prompts")
def _() -> None:
    assert len(list(client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=4, stream=True))) > 1


@call("openai", "completions, logprobs = 3", "logprobs")
def _() -> None:
    told = client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, logprobs=3).choices[0].logprobs
    assert all(1 <= len(each) <= 3 for each in told.top_logprobs)  # pyright: ignore


@call("openai", "completions, echo", "echo")
def _() -> None:
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, echo=True)


@call("openai", "completions, best_of", "best_of")
def _() -> None:
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, best_of=2)


@call("openai", "completions, suffix", "suffix")
def _() -> None:
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, suffix=".")


@call("openai", "responses")
def _() -> None:
    told = client.responses.create(model=MODEL, input="Say hello.", instructions="Be short.", max_output_tokens=8)
    assert told.status in ("completed", "incomplete")
    assert told.usage.output_tokens <= 8  # pyright: ignore


@call("openai", "responses, async")
def _() -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=BASE, api_key=TOKEN, max_retries=0) as other:
            return await other.responses.create(model=MODEL, input="Say hello.", max_output_tokens=8)

    assert asyncio.run(ask()).id.startswith("resp_")


@call("openai", "responses, stream")
def _() -> None:
    events = list(client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == [*range(len(events))]


@call("openai", "responses.parse", "text.format")
def _() -> None:
    told = client.responses.parse(model=MODEL, input="Hello", text_format=Sum, max_output_tokens=200)
    assert isinstance(told.output_parsed, Sum)


@call("openai", "responses.stream (helper) with a format", "text.format")
def _() -> None:
    with client.responses.stream(model=MODEL, input="Hello", text_format=Sum, max_output_tokens=200) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Sum)


@call("openai", "responses, a tool and its answer", "tools")
def _() -> None:
    options = {"model": MODEL, "tools": FLAT_TOOLS, "parallel_tool_calls": False, "max_output_tokens": 200}
    made = client.responses.create(input=SAY, tool_choice="required", **options)
    (called,) = made.output
    is_sum(called.arguments)
    answer = {"type": "function_call_output", "call_id": called.call_id, "output": "3"}
    client.responses.create(input=[*SAY, called, answer], **options | {"max_output_tokens": 8})


@call("openai", "responses, store = true", "store")
def _() -> None:
    client.responses.create(model=MODEL, input="Hello", store=True)


@call("openai", "responses, previous_response_id", "previous_response_id")
def _() -> None:
    client.responses.create(model=MODEL, input="Hello", previous_response_id="resp_1")


@call("openai", "responses, web_search", "tools")
def _() -> None:
    client.responses.create(model=MODEL, input="Hello", tools=[{"type": "web_search"}])


@call("openai", "responses.retrieve", "responses response")
def _() -> None:
    client.responses.retrieve("resp_1")


@call("openai", "embeddings", "embeddings")
def _() -> None:
    client.embeddings.create(model=MODEL, input="Hello")


@call("openai", "moderations, images, audio", "moderations")
def _() -> None:
    client.moderations.create(input="Hello")


@call("openai", "a prompt that is too long", "context")
def _() -> None:
    try:
        chat(messages=[{"role": "user", "content": "hello " * 200_000}])
    except openai.BadRequestError as error:
        if error.code == "context_length_exceeded" and error.type == "invalid_request_error":
            raise
        raise AssertionError(f"type {error.type}, code {error.code}") from error


@call("openai", "another model", "model")
def _() -> None:
    chat(model="gpt-5")


@call("openai", "a wrong key", "token")
def _() -> None:
    openai.OpenAI(base_url=BASE, api_key="wrong", max_retries=0).models.list()


# --- litellm


def lite(**options: Any) -> Any:
    given = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": TOKEN, "messages": SAY, "max_tokens": 8}
    return litellm.completion(**given | {"num_retries": 0} | options)


@call("litellm", "completion")
def _() -> None:
    assert lite().choices


@call("litellm", "completion, stream")
def _() -> None:
    assert list(lite(stream=True))


@call("litellm", "acompletion")
def _() -> None:
    given = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": TOKEN, "messages": SAY, "max_tokens": 8}
    assert asyncio.run(litellm.acompletion(**given)).choices


@call("litellm", "completion, top_logprobs", "top_logprobs")
def _() -> None:
    assert len(lite(logprobs=True, top_logprobs=3).choices[0].logprobs.content[0].top_logprobs) == 3


@call("litellm", "completion, response_format = a pydantic model", "response_format")
def _() -> None:
    is_sum(lite(response_format=Sum, max_tokens=200).choices[0].message.content)


@call("litellm", "completion, a named tool", "tools")
def _() -> None:
    calls_add(lite(tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False, max_tokens=200).choices[0].message)


@call("litellm", "responses")
def _() -> None:
    told = litellm.responses(
        model=f"openai/{MODEL}", input="Hello", api_base=BASE, api_key=TOKEN, max_output_tokens=8
    )  # fmt: skip
    assert told.id


@call("litellm", "embedding", "embeddings")
def _() -> None:
    litellm.embedding(model=f"openai/{MODEL}", input=["Hello"], api_base=BASE, api_key=TOKEN)


# --- langchain-openai


def chain(**options: Any) -> ChatOpenAI:
    given = {"model": MODEL, "base_url": BASE, "api_key": TOKEN, "max_retries": 0, "timeout": LONGEST_S}
    return ChatOpenAI(**given | {"max_tokens": 200} | options)


@call("langchain", "invoke")
def _() -> None:
    assert chain(max_tokens=8).invoke("Hello").response_metadata


@call("langchain", "stream")
def _() -> None:
    assert list(chain(max_tokens=8).stream("Hello"))


@call("langchain", "batch")
def _() -> None:
    assert len(chain(max_tokens=8).batch(["a", "b"])) == 2


@call("langchain", "bind_tools, any", "tools")
def _() -> None:
    told = chain().bind_tools([Sum], tool_choice="any", parallel_tool_calls=False).invoke("Hello")
    Sum.model_validate(told.tool_calls[0]["args"])


@call("langchain", "with_structured_output, json_schema", "response_format")
def _() -> None:
    assert isinstance(chain().with_structured_output(Sum, method="json_schema").invoke("Hello"), Sum)


@call("langchain", "with_structured_output, function_calling", "tools")
def _() -> None:
    assert isinstance(chain().with_structured_output(Sum, method="function_calling").invoke("Hello"), Sum)


@call("langchain", "with_structured_output, json_mode", "response_format")
def _() -> None:
    kind = chain(max_tokens=64).with_structured_output(Sum, method="json_mode", include_raw=True)
    try:
        said = kind.invoke("Hello, in JSON")["raw"].content
    except openai.LengthFinishReasonError as error:  # what a small model says has no end
        said = error.completion.choices[0].message.content
    assert said.startswith("{")  # pyright: ignore


@call("langchain", "use_responses_api")
def _() -> None:
    assert chain(max_tokens=8, use_responses_api=True).invoke("Hello").id


@call("langchain", "logprobs, top_logprobs", "top_logprobs")
def _() -> None:
    told = chain(max_tokens=4).bind(logprobs=True, top_logprobs=2).invoke("Hello")
    assert len(told.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


# --- instructor


def instructed(mode: Any) -> Sum:
    asked = instructor.from_openai(client, mode=mode)
    return asked.chat.completions.create(
        model=MODEL, messages=SAY, response_model=Sum, max_retries=0, max_tokens=300
    )  # fmt: skip


@call("instructor", "TOOLS", "tools")
def _() -> None:
    assert isinstance(instructed(instructor.Mode.TOOLS), Sum)


@call("instructor", "TOOLS_STRICT", "tools")
def _() -> None:
    assert isinstance(instructed(instructor.Mode.TOOLS_STRICT), Sum)


@call("instructor", "RESPONSES_TOOLS", "tools")
def _() -> None:
    asked = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    told = asked.responses.create(model=MODEL, input="Hello", response_model=Sum, max_retries=0, max_output_tokens=300)
    assert isinstance(told, Sum)


@call("instructor", "create_partial, a stream", "response_format")
def _() -> None:
    asked = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    options = {"model": MODEL, "messages": SAY, "max_tokens": 300}
    *_, last = asked.chat.completions.create_partial(response_model=Sum, **options)
    assert last.sign in ("plus", "minus")


@call("instructor", "JSON_SCHEMA", "response_format")
def _() -> None:
    assert isinstance(instructed(instructor.Mode.JSON_SCHEMA), Sum)


@call("instructor", "JSON", "response_format")
def _() -> None:
    try:
        instructed(instructor.Mode.JSON)
    except (
        InstructorRetryException,
        IncompleteOutputException,
    ) as error:  # any JSON object is right: only the prompt has the schema
        if error.last_completion is None:
            raise
        choice = error.last_completion.choices[0]
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


# --- curl


def curl(path: str, body: Any = None, *more: str) -> tuple[int, str]:
    sent = [] if body is None else ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    command = ["curl", "-s", "-i", f"{URL}{path}", "-H", f"Authorization: Bearer {TOKEN}", *sent, *more]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONGEST_S).stdout
    return int(said.split()[1]), said


@call("curl", "chat")
def _() -> None:
    assert curl("/v1/chat/completions", {"model": MODEL, "messages": SAY, "max_tokens": 4})[0] == 200


@call("curl", "responses, stream")
def _() -> None:
    asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "stream": True}
    assert "event: response.created" in curl("/v1/responses", asked)[1]


@call("curl", "tokenize, detokenize")
def _() -> None:
    ids = json.loads(curl("/tokenize", {"prompt": "Hello"})[1].rpartition("\n\n")[2])["tokens"]
    assert json.loads(curl("/detokenize", {"tokens": ids})[1].rpartition("\n\n")[2])["prompt"] == "Hello"


@call("curl", "version, health, metrics, openapi.json")
def _() -> None:
    for path in ("/version", "/health", "/metrics", "/openapi.json"):
        assert curl(path)[0] == 200, path


@call("curl", "a wrong method")
def _() -> None:
    status, said = curl("/v1/chat/completions")
    assert status == 405
    assert re.search(r"(?im)^allow: .*POST", said)


# --- outcomes


def outcome(names: str, made: Callable[[], Any]) -> str:
    try:
        made()
    except Exception as error:  # noqa: BLE001 - whatever the client shows is what is judged
        said = " ".join(f"{type(error).__name__}: {error}".split())
        is_4xx = re.search(r"\b4\d\d\b|BadRequest|NotFound", said)  # litellm says no number
        refused = is_4xx and any(word in said for word in names.split())
        shown = re.search(r"'message': (['\"])(.+?)\1, '", said)
        return f"refused: {shown.group(2) if shown else said}"[:150] if refused else f"BROKEN: {said}"[:300]
    return "works"


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    for who, what, names, made in calls:
        if len(sys.argv) > 2 and sys.argv[2] not in f"{who} {what}":
            continue
        began = time.monotonic()
        row = {"client": who, "call": what, "outcome": outcome(names, made), "seconds": time.monotonic() - began}
        print(json.dumps(row), flush=True)
