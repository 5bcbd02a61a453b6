"""Read the prompts of a data set: which column holds the prompt, and what is kept for the reward functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tandem.data.conversation import (
    BadRow,
    FromSource,
    as_object,
    check_text,
    instruction,
    located,
    parse_messages,
    said_by,
    with_system,
)
from tandem.data.load import DataSplit, RowFormat, load
from tandem.errors import SpecError
from tandem.spec.data import DatasetData, FileData, RecordedData, is_file_name, with_kind
from tandem.spec.load import plain_message
from tandem.types import Message, text_of

FIELD = "environment.params.data"
PROMPT_COLUMNS = ("prompt", "messages", "conversations", "instruction", "question", "problem", "text")
"""The columns in which a prompt is looked for, in this order."""
_DATA: TypeAdapter[FileData | DatasetData] = TypeAdapter(RecordedData)


@dataclass(frozen=True, slots=True)
class PromptRow(FromSource):
    """A prompt, and the row that it comes from."""

    messages: tuple[Message, ...]
    prompt: str | tuple[Message, ...]
    """As the row has it: a text, or messages."""
    columns: Mapping[str, Any]

    @property
    def key(self) -> tuple[Message, ...]:
        return self.messages


def data_spec(data: str | Mapping[str, Any]) -> FileData | DatasetData:
    """Return the checked table that says where the prompts are; a text names a file, a directory or a data set."""
    written = {"path" if is_file_name(data) else "name": data} if isinstance(data, str) else dict(data)
    try:
        spec = _DATA.validate_python(with_kind(written))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "union_tag_not_found":
            raise SpecError(
                f"{FIELD} = {written}: add path, for a file, or name, for a directory or a data set"
            ) from error
        field = ".".join(map(str, first["loc"][1:]))
        raise SpecError(f"{FIELD}.{field} = {first['input']!r}: {plain_message(first)}") from error
    if spec.max_tokens:
        raise SpecError(f"{FIELD}.max_tokens = {spec.max_tokens}: has no effect on prompts; leave it out")
    return spec


def load_prompts(spec: FileData | DatasetData, system: str) -> DataSplit[PromptRow]:
    """Read the prompts. `system`: put before each prompt that has no system message."""
    base = Path(spec.path).parent if isinstance(spec, FileData) else None

    def understood(row: object, number: int, source: str) -> PromptRow:
        columns = as_object(row)
        messages = located(with_system({"system": system}, parse_prompt(columns)), base)
        check_text(messages)
        prompt = columns.get("prompt")
        said = prompt if isinstance(prompt, str) else messages if _is_chat(columns) else _text_of(messages)
        return PromptRow(messages, said, _with_answer(columns), row=number, source=source)

    def named(row: Mapping[Any, Any]) -> str:
        return f"prompts (column {column_of(row)})"

    return load(spec, FIELD, RowFormat("prompt", (), understood, named, '{ prompt = "question" }'))


def parse_prompt(row: Mapping[Any, Any]) -> tuple[Message, ...]:
    """Return the messages to answer: without the assistant's last turn, if a row has one."""
    column = column_of(row)
    if not column:
        raise BadRow(f"no prompt in its columns ({', '.join(map(str, row))})")
    if column == "instruction":
        messages = said_by(instruction(row), "user")
    elif _is_chat(row):
        messages = parse_messages(row[column], images=True)
        messages = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    else:
        messages = said_by(row[column], "user", images=True)
    if not messages:
        raise BadRow("no messages")
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadRow("the prompt does not end with the user's turn")
    return with_system(row, messages)


def column_of(row: Mapping[Any, Any]) -> str:
    """Return the column that holds the prompt; empty if there is none."""
    return next((name for name in PROMPT_COLUMNS if row.get(name) is not None), "")


def _is_chat(row: Mapping[Any, Any]) -> bool:
    column = column_of(row)
    return column in ("messages", "conversations") or not isinstance(row[column], str)


def _text_of(messages: tuple[Message, ...]) -> str:
    return text_of(messages[-1]["content"])


def _with_answer(row: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return the row's columns; the last turn of a recorded chat is its `completion`, unless it has that column."""
    columns = {str(name): value for name, value in row.items()}
    if column_of(row) in ("messages", "conversations") and "completion" not in columns:
        said = parse_messages(row[column_of(row)], images=True)
        if said and said[-1]["role"] == "assistant":
            columns["completion"] = said[-1]["content"]
    return columns
