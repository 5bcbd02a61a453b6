"""Turn a row of a file or data set into a conversation, or say why it cannot be one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
KEPT = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")  # fields that chat templates read


class BadRow(ValueError):
    """A row cannot be used. Rows with the same fault have the same text, so that reasons can be counted."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with an assistant turn, and their source."""

    messages: tuple[Message, ...]
    row: int
    """The line of a file, or the position in a data set; the first is 1."""
    source: str = ""
    """The file or data set that `row` counts in."""

    @property
    def key(self) -> tuple[Message, ...]:
        return self.messages


def parse_row(row: object) -> tuple[Message, ...]:
    """Return the messages of `{"messages": [...]}` or `{"prompt": ..., "completion": ...}`; ignore other columns."""
    row = as_object(row)
    if row.get("messages") is not None:
        messages = _messages(row["messages"])
    elif row.get("prompt") is not None and row.get("completion") is not None:
        messages = (*said_by(row["prompt"], "user"), *said_by(row["completion"], "assistant"))
    else:
        raise BadRow("neither messages, nor prompt and completion")
    if not messages:
        raise BadRow("no messages")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("no assistant turn")
    if messages[-1]["role"] != "assistant":
        raise BadRow("the last turn is not the assistant's")
    check_text(messages)
    return messages


def as_object(row: object) -> Mapping[Any, Any]:
    if isinstance(row, BadRow):  # the row could not be read
        raise row
    if not isinstance(row, Mapping):
        raise BadRow("not an object")
    return row


def said_by(value: object, role: str) -> tuple[Message, ...]:
    """Return the messages of a prompt or an answer, which is a text or messages."""
    return _messages([{"role": role, "content": value}] if isinstance(value, str) else value)


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise BadRow("messages are not a list")
    return tuple(_message(item) for item in value)


def _message(value: object) -> Message:
    if not isinstance(value, Mapping):
        raise BadRow("a message is not an object")
    # Tables fill missing fields of a message with nulls.
    message = {key: value[key] for key in KEPT if value.get(key) is not None}
    if "role" not in message:
        raise BadRow("a message without role")
    if message["role"] not in ROLES:
        raise BadRow("unknown role")
    for key in ("content", "reasoning_content", "tool_call_id", "name"):
        if not isinstance(message.get(key, ""), str):
            raise BadRow(f"{key} is not text")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow("tool_calls are not a list of objects")
    if not calls:
        message.pop("tool_calls", None)
        if not message.get("content", "").strip():
            raise BadRow("empty content")
    return {"content": "", **message}


def check_text(messages: Sequence[Message]) -> None:
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which tokenizers refuse
        raise BadRow("text that is not Unicode (a lone surrogate)") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow("a value that is not JSON") from error
