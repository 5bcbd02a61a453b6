"""Parse tool calls of Hermes and Qwen models: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from tandem.types import ToolCall

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"


def parse_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text outside the calls, and the calls in order; an unreadable call has an error."""
    said, *pieces = text.split(TOOL_CALL)
    if not pieces:
        return text, []
    calls: list[ToolCall] = []
    for piece in pieces:
        raw, closed, after = piece.partition(END_TOOL_CALL)
        calls.append(_parse(raw) if closed else ToolCall("", {}, f"it is not closed by {END_TOOL_CALL}", raw))
        said += after
    return said.strip(), calls


def _parse(raw: str) -> ToolCall:
    try:
        call = json.loads(raw, parse_constant=_refuse)
        json.dumps(call, ensure_ascii=False).encode()  # refuses lone surrogates
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"it is not JSON: {error}", raw)
    if not isinstance(call, dict):
        return ToolCall("", {}, "it is no JSON object", raw)
    fields = cast("dict[str, Any]", call)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, "it has no name", raw)
    if not isinstance(arguments, Mapping):
        return ToolCall("", {}, f"the arguments of '{name:.80}' are no JSON object", raw)
    return ToolCall(name, cast("Mapping[str, Any]", arguments), "", raw)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
