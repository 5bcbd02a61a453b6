"""Turn a row into a prompt with two answers, or say why it cannot be one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tandem.data.conversation import BadRow, FromSource, as_object, check_text, said_by
from tandem.data.load import DataSplit, RowFormat, load
from tandem.spec.data import DatasetData, FileData
from tandem.types import Message

PAIR = ("prompt", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Pair(FromSource):
    """A prompt, which is the common beginning of two conversations, and two answers. Both begin and end with the
    assistant."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]

    @property
    def key(self) -> tuple[Message, ...]:
        """The prompt: pairs with the same prompt must be on one side of the split."""
        return self.prompt


def load_pairs(spec: FileData | DatasetData, field_name: str = "data", *, sees: bool = False) -> DataSplit[Pair]:
    return load(spec, field_name, PAIRS, sees=sees)


def parse_pair(row: object) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """Return prompt, chosen and rejected of `{"prompt": ..., "chosen": ..., "rejected": ...}`; ignore other columns.

    Without a prompt, or if they repeat it, `chosen` and `rejected` are whole conversations.
    """
    row = as_object(row)
    prompt = () if row.get("prompt") is None else _of_field("prompt", row["prompt"], "user")
    chosen, rejected = (_conversation(row, name, prompt) for name in ("chosen", "rejected"))
    shared = len(list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))))
    if chosen == rejected:
        raise BadRow("chosen and rejected are equal")
    if not shared:
        raise BadRow("no prompt, and chosen and rejected have no common beginning")
    if shared == min(len(chosen), len(rejected)):
        raise BadRow("one of chosen and rejected is the beginning of the other")
    if not chosen[shared]["role"] == rejected[shared]["role"] == "assistant":
        raise BadRow("chosen and rejected first differ at a turn that is not the assistant's")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _conversation(row: Mapping[Any, Any], name: str, prompt: tuple[Message, ...]) -> tuple[Message, ...]:
    if row.get(name) is None:
        kto = "; algorithm.kind = 'kto' learns from answers with a label" if "label" in row else ""
        raise BadRow(f"no {name} in its columns ({', '.join(map(str, row))}){kto}")
    messages = _of_field(name, row[name], "assistant")
    if messages[-1]["role"] != "assistant":
        raise BadRow(f"{name}: the last turn is not the assistant's")
    if messages[0]["role"] == "assistant":
        return (*prompt, *messages)
    if messages[: len(prompt)] != prompt:
        raise BadRow(f"{name}: does not begin with the prompt")
    return messages


def _of_field(name: str, value: object, role: str) -> tuple[Message, ...]:
    try:
        messages = said_by(value, role)
        check_text(messages)
    except BadRow as bad:
        raise BadRow(f"{name}: {bad}") from bad
    if not messages:
        raise BadRow(f"{name}: no messages")
    return messages


PAIRS = RowFormat(
    "pair",
    (PAIR,),
    lambda row, number, source: Pair(*parse_pair(row), row=number, source=source),
    lambda row: "chosen and rejected" if row.get("prompt") is None else "prompt, chosen and rejected",
    '{ prompt = "question", chosen = "better", rejected = "worse" }',
)
