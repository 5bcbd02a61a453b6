"""Turn a row of a file or data set into a conversation, or say why it cannot be one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
KEPT = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")  # fields that chat templates read


SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""What ShareGPT's `from` says, as a role."""


NO_IMAGES = "a message has an image, and only recipe = 'sft' and recipe = 'rl' train on images"
IMAGE_COLUMNS = ("images", "image")


class BadRow(ValueError):
    """A row cannot be used. Rows with the same fault have the same text, so that reasons can be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromSource:
    """Where something was read."""

    row: int
    """The line of a file, or the position in a data set; the first is 1."""
    source: str = ""
    """The file or data set that `row` counts in."""


@dataclass(frozen=True, slots=True)
class Conversation(FromSource):
    """Messages that end with an assistant turn, and their source."""

    messages: tuple[Message, ...]

    @property
    def key(self) -> tuple[Message, ...]:
        return self.messages


CHAT, SHAREGPT = ("messages",), ("conversations", "system")
PROMPT_COMPLETION, ALPACA = ("prompt", "completion", "system"), ("instruction", "input", "output", "system")
SHAPES = {CHAT: "chats", SHAREGPT: "ShareGPT", PROMPT_COMPLETION: "prompt and completion", ALPACA: "Alpaca"}
"""The families of columns that make a conversation, in the order in which they are looked for, and their names."""


def shape_of(row: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the family of columns that a row has; empty if it has none."""

    def there(*names: str) -> bool:
        return all(row.get(name) is not None for name in names)

    needed = {CHAT: CHAT, SHAREGPT: SHAREGPT[:1], PROMPT_COMPLETION: PROMPT_COMPLETION[:2], ALPACA: ALPACA[::2]}
    return next((shape for shape, names in needed.items() if there(*names)), ())


def parse_row(row: object, *, images: bool = False) -> tuple[Message, ...]:
    """Return the messages of a chat, a ShareGPT or Alpaca row, or a prompt and its completion; ignore other columns.
    `images`: whether contents may have parts that are images; they are returned as the row has them."""
    row = as_object(row)
    shape = shape_of(row)
    if not shape:
        raise BadRow(f"no conversation in its columns ({', '.join(map(str, row))})")
    if shape in (CHAT, SHAREGPT):
        messages = parse_messages(row[shape[0]], images=images)
    elif shape == ALPACA:
        messages = (*said_by(instruction(row), "user"), *said_by(row["output"], "assistant"))
    else:
        messages = (*said_by(row["prompt"], "user", images=images), *said_by(row["completion"], "assistant"))
    if not messages:
        raise BadRow("no messages")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("no assistant turn")
    if messages[-1]["role"] != "assistant":
        raise BadRow("the last turn is not the assistant's")
    messages = with_system(row, messages) if shape != CHAT else messages
    check_text(messages)
    return messages


def instruction(row: Mapping[Any, Any]) -> object:
    """Return an Alpaca row's instruction, with its input, if it has one, below."""
    asked, given = row["instruction"], row.get("input")
    return f"{asked}\n\n{given}" if isinstance(asked, str) and given else asked


def with_system(row: Mapping[Any, Any], messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Begin with the text of the column `system`, unless the messages begin with a system message."""
    if not row.get("system") or (messages and messages[0]["role"] in ("system", "developer")):
        return messages
    return (*said_by(row["system"], "system"), *messages)


def as_object(row: object) -> Mapping[Any, Any]:
    if isinstance(row, BadRow):  # the row could not be read
        raise row
    if not isinstance(row, Mapping):
        raise BadRow("not an object")
    return row


def said_by(value: object, role: str, *, images: bool = False) -> tuple[Message, ...]:
    """Return the messages of a prompt or an answer, which is a text, a message or messages."""
    if isinstance(value, Mapping):
        return parse_messages([value], images=images)
    said = [{"role": role, "content": value}] if isinstance(value, str) else value
    return parse_messages(said, images=images)


def parse_messages(value: object, *, images: bool = False) -> tuple[Message, ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # tables without lists hold them as JSON
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise BadRow("messages are not a list")
    return tuple(_message(item, images=images) for item in value)


def _message(value: object, *, images: bool) -> Message:
    if not isinstance(value, Mapping):
        raise BadRow("a message is not an object")
    if "role" not in value and "from" in value:
        value = _of_sharegpt(value)
    # Tables fill missing fields of a message with nulls.
    message = {key: value[key] for key in KEPT if value.get(key) is not None}
    if "role" not in message:
        raise BadRow("a message without role")
    if message["role"] not in ROLES:
        raise BadRow("unknown role")
    for key in ("content", "reasoning_content", "tool_call_id", "name"):
        if not isinstance(message.get(key, ""), (str, list) if images and key == "content" else str):
            raise BadRow(NO_IMAGES if key == "content" and _shows(message[key]) else f"{key} is not text")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow("tool_calls are not a list of objects")
    if not calls:
        message.pop("tool_calls", None)
        content = message.get("content", "")
        if not (content.strip() if isinstance(content, str) else content):
            raise BadRow("empty content")
    return {"content": "", **message}


def _shows(content: object) -> bool:
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)


def _of_sharegpt(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    role = SHAREGPT_ROLES.get(value["from"]) if isinstance(value["from"], str) else None
    if role is None:
        raise BadRow("unknown role in from")
    return {"role": role, "content": value.get("value")}


def located(messages: Sequence[Message], base: Path | None) -> tuple[Message, ...]:
    """Return the messages with whole paths for images. `base`: the directory of the file that they come from; None:
    they come from none, so no path of theirs is read."""
    return tuple(
        {**each, "content": [_located(part, base) for part in each["content"]]}
        if isinstance(each["content"], list)
        else each
        for each in messages
    )


def _located(part: Any, base: Path | None) -> Any:
    is_image = isinstance(part, Mapping) and part.get("type") == "image"
    path = (part.get("path") or part.get("image")) if is_image else None
    if not isinstance(path, str) or path.startswith(("data:", "http:", "https:")):
        return part
    if base is None:
        raise BadRow("an image by its path, which only a file can have; give a data URI")
    return {"type": "image", "path": str(base / path)}


def check_columns(row: object) -> object:
    """Return the row. BadRow if images stand beside the messages: they would be left out."""
    if column := next((name for name in IMAGE_COLUMNS if as_object(row).get(name)), ""):
        raise BadRow(f"a column '{column}', which is not read; an image is a part of a message's content")
    return row


def check_text(messages: Sequence[Message]) -> None:
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which tokenizers refuse
        raise BadRow("text that is not Unicode (a lone surrogate)") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow("a value that is not JSON") from error
