"""What an answer must be: `response_format` and `tool_choice` of a chat, as a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from tandem.io.tool_calls import END_TOOL_CALL, TOOL_CALL
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.request_bounds import MAX_TOOLS_BYTES
from tandem.serve.openai.strict import Strict
from tandem.types import Grammar

# One way to write each JSON value: a small model may else write white space without end.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class JsonSchema(Strict):
    name: str = Field("", max_length=256)
    description: str = ""
    of_answer: dict[str, Any] = Field(alias="schema")
    strict: bool = False
    """Answers follow the schema in either case."""


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema comes with type = 'json_schema', and only with it")
        return self

    @property
    def schema_of_answer(self) -> Mapping[str, Any] | None:
        """The schema; None for any text."""
        if self.type == "text":
            return None
        return self.json_schema.of_answer if self.json_schema is not None else {"type": "object"}


class NamedFunction(Strict):
    name: str = Field(min_length=1, max_length=256)


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


def _known_choice(choice: Any) -> Any:
    if choice == "any":  # as other services name it
        return "required"
    named = isinstance(choice, dict) and choice.get("type") == "function"
    if named or choice in ("auto", "none", "required"):
        return choice
    raise ValueError("must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}")


ToolChoice: TypeAlias = Annotated[Literal["auto", "none", "required"] | NamedTool, BeforeValidator(_known_choice)]


def grammar_of(
    schema: Mapping[str, Any] | None,
    choice: Literal["auto", "none", "required"] | NamedTool,
    tools: Sequence[Mapping[str, Any]],
    *,
    one_call: bool,
    mark: Callable[[str], str],
    after: str,
) -> Grammar | None:
    """Return what the answer must be; None for any. `one_call`: of tools at most. `mark`: how the grammar writes a mark
    of a call. `after`: the text that ends a thought which the prompt has begun."""
    forced = choice not in ("auto", "none")
    if schema is None and not forced:
        return None
    callable_tools = [] if choice == "none" else [tool["function"] for tool in tools]
    if isinstance(choice, NamedTool):
        callable_tools = [each for each in callable_tools if each["name"] == choice.function.name]
        if not callable_tools:
            raise RequestRefused(422, f"no tool is named '{choice.function.name}'", field="tool_choice")
    elif forced and not callable_tools:
        raise RequestRefused(422, f"'{choice}' without tools; send some", field="tool_choice")
    rules, starts = list[str](), list[str]()
    if schema is not None and not forced:
        starts.append("answer")
        rules.append(f"answer: {_as_json(schema, 'response_format')}")
    if callable_tools:
        starts.append("call" if one_call else 'call ("\\n" call)*')
        bodies = " | ".join(f"tool_{number}" for number in range(len(callable_tools)))
        rules.append(f'call: {mark(TOOL_CALL)} "\\n"? ({bodies}) "\\n"? {mark(END_TOOL_CALL)}')
        for number, tool in enumerate(callable_tools):
            opening = json.dumps('{"name": ' + json.dumps(tool["name"]) + ', "arguments": ')
            rules.append(f'tool_{number}: {opening} args_{number} "}}"')
            rules.append(f"args_{number}: {_as_json({'type': 'object', **tool.get('parameters', {})}, 'tools')}")
    alone = json.dumps(schema) if schema is not None and not callable_tools else ""
    lark = "\n".join([f"start: {' | '.join(starts)}", *rules])
    return Grammar("tool_choice" if forced else "response_format", lark, alone, after)


def _as_json(schema: Mapping[str, Any], field: str) -> str:
    written = json.dumps({**_closed(schema), "x-guidance": _WRITTEN})
    if len(written) > MAX_TOOLS_BYTES:
        raise RequestRefused(422, f"a schema may have at most {MAX_TOOLS_BYTES} bytes; send a smaller one", field=field)
    return f"%json {written}"


def _closed(schema: Any) -> Any:
    """Return the schema with objects that have only the properties it names, unless it says otherwise: a model would
    add others without end. The parts of `allOf` stay open, because each names only some of the properties."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    told = dict[str, Any]()
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            told[name] = {key: _closed(each) for key, each in value.items()}
        else:
            told[name] = value if name in _DATA else _closed(value)
    if isinstance(schema.get("properties"), dict) and not schema.keys() & _OPENERS:
        told["additionalProperties"] = False
    return told


_MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_DATA = frozenset({"allOf", "const", "default", "enum", "examples"})
_OPENERS = frozenset(
    {"additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties", "$ref"}
)
