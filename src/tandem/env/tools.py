"""Tools of an environment: Python functions, their JSON schemas, and the answers to a model's calls.

    TOOLS = Tools(add, look_up, timeout_s=5)

    async def run(self, task, chat):
        chat.offer(TOOLS.schemas)
        reply = await TOOLS.play(chat)          # until a reply calls no tool
        return Outcome(float(reply.text == task.payload["answer"]))

A bad call or a failing tool becomes an answer to the model; it never ends the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
import typing
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from tandem.errors import SpecError
from tandem.protocols import Chat, Reply
from tandem.types import Message, ToolCall

Function = Callable[..., Any]

MAX_CHARS = 16_000  # characters of one answer; more would fill the context
MAX_CALLS = 16  # in one reply


class Tools:
    def __init__(self, *functions: Function, timeout_s: float = 30.0) -> None:
        """`timeout_s`: for each call. A function that is not async runs in a thread and is abandoned at the timeout."""
        self._functions = {function.__name__: function for function in functions}
        if len(self._functions) < len(functions):
            raise SpecError(f"tools: two of {', '.join(each.__name__ for each in functions)} have the same name")
        self._arguments = {name: arguments_of(function) for name, function in self._functions.items()}
        self._timeout_s = timeout_s
        self.schemas = [schema_of(function) for function in functions]

    async def play(self, chat: Chat, *, most: int = 8) -> Reply:
        """Ask for replies and answer their calls, until a reply calls no tool or after `most`; return the last."""
        for _ in range(most - 1):
            reply = await chat.reply()
            if not reply.tool_calls:
                return reply
            chat.say(*await self.answer(reply.tool_calls))
        return await chat.reply()

    async def answer(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Run the calls one after the other; return a message of role "tool" for each."""
        contents = [await self._call(call) for call in calls[:MAX_CALLS]]
        contents += [f"error: only {MAX_CALLS} calls are answered in a turn"] * (len(calls) - len(contents))
        return [
            {"role": "tool", "name": call.name, "content": content}
            for call, content in zip(calls, contents, strict=True)
        ]

    async def _call(self, call: ToolCall) -> str:
        if call.error:
            return f"error: this tool call cannot be read: {call.error}"
        if (function := self._functions.get(call.name)) is None:
            return f"error: no tool is called '{call.name:.80}'; there are: {', '.join(self._functions)}"
        try:
            arguments = self._arguments[call.name].model_validate_json(json.dumps(dict(call.arguments)), strict=True)
        except ValidationError as error:
            return f"error: {_why(error)}"
        except (ValueError, RecursionError) as error:
            return f"error: arguments: {error}"
        given = {name: getattr(arguments, name) for name in type(arguments).model_fields}
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await _started(function, given)
        except TimeoutError:
            return f"error: {call.name} gave no answer within {self._timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - a tool's errors are answers to the model
            return f"error: {type(error).__name__}: {error}"[:MAX_CHARS]
        return _text(answer)


def schema_of(function: Function) -> dict[str, Any]:
    """Return the function's schema in OpenAI's form, which chat templates read."""
    described, _ = _documentation(function)
    parameters = _plain(arguments_of(function).model_json_schema())
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": described, "parameters": parameters},
    }


def arguments_of(function: Function) -> type[BaseModel]:
    """Return a pydantic model of the function's parameters."""
    return _arguments_of(getattr(function, "__func__", function), inspect.ismethod(function))


@lru_cache(maxsize=256)
def _arguments_of(function: Function, bound: bool) -> type[BaseModel]:
    name = function.__name__
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise SpecError(f"tool {name}: its annotations cannot be read: {error}") from error
    _, described = _documentation(function)
    fields: dict[str, Any] = {}
    for key, parameter in list(inspect.signature(function).parameters.items())[bound:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SpecError(f"tool {name}: {parameter} cannot be written as JSON schema; name every parameter")
        if key not in hints:
            raise SpecError(f"tool {name}: parameter {key} has no type; annotate it, as in {key}: str")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[key] = (hints[key], Field(default, description=described.get(key)))
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    try:
        model = create_model(name, __config__=config, **fields)
        model.model_json_schema()
    except (PydanticUserError, NameError, TypeError) as error:
        raise SpecError(f"tool {name}: no JSON schema can be made of its signature: {error}") from error
    return model


async def _started(function: Function, given: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await cast("Coroutine[Any, Any, Any]", function(**given))
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_exception(error) if error is not None else answer.set_result(value)

    def work() -> None:
        value, failure = None, None
        try:
            value = function(**given)
        except StopIteration as error:  # a future cannot hold StopIteration
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:  # noqa: BLE001 - passed to the caller
            failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    # A daemon thread: one that never ends must not block the exit of the process.
    threading.Thread(target=work, name=f"tool {function.__name__}", daemon=True).start()
    return await answer


def _text(answer: object) -> str:
    if not isinstance(answer, str):
        answer = json.dumps(answer, ensure_ascii=False, default=str)
    answer = answer.encode("utf-8", "replace").decode()  # a lone surrogate cannot be tokenised
    cut = len(answer) - MAX_CHARS
    return answer if cut <= 0 else f"{answer[:MAX_CHARS]}... ({cut} characters more)"


def _why(error: ValidationError) -> str:
    problems = [f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in error.errors()]
    return "; ".join(problems[:4])


def _documentation(function: Function) -> tuple[str, dict[str, str]]:
    """Return the docstring's first paragraph and its text on each parameter, under `Args:` or as `:param name:`."""
    text = inspect.getdoc(function) or ""
    described = dict(re.findall(r"^:param (?:\w+ )?(\w+): *(.+)$", text, re.MULTILINE))
    if section := re.search(r"^(?:Args|Arguments|Parameters):\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE):
        lines = inspect.cleandoc("\n" + section[1])
        for name, said in re.findall(r"^(\w+)(?: *\([^)]*\))?: *(.+(?:\n[ \t]+.+)*)", lines, re.MULTILINE):
            described[name] = " ".join(said.split())
    opening = re.split(
        r"\n\s*\n|^(?=(?:Args|Arguments|Parameters|Returns):$|:param )", text, maxsplit=1, flags=re.MULTILINE
    )
    return " ".join(opening[0].split()), described


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without titles and references: the prompt should be short and self-contained."""
    definitions = schema.pop("$defs", {})

    def plain(value: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [plain(each, inside) for each in cast("list[Any]", value)]
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        if name := str(fields.get("$ref", "")).removeprefix("#/$defs/"):
            if name in inside:
                raise SpecError(f"tool {schema.get('title')}: its argument of type {name} contains itself")
            rest = {key: each for key, each in fields.items() if key != "$ref"}
            return {**plain(definitions[name], (*inside, name)), **rest}
        return {
            key: {name: plain(each, inside) for name, each in value.items()}
            if key == "properties"
            else plain(value, inside)
            for key, value in fields.items()
            if key != "title" and not (key == "default" and value is None)
        }

    return plain(schema, ())
