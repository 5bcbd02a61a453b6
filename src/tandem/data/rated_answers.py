"""Turn a row into a prompt with answers that are labelled good or bad, or say why it cannot be one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.data.conversation import (
    ALPACA,
    CHAT,
    PROMPT_COMPLETION,
    SHAPES,
    SHAREGPT,
    BadRow,
    FromSource,
    as_object,
    parse_row,
    said_by,
    shape_of,
)
from tandem.data.load import DataSplit, RowFormat, load
from tandem.data.preference_pairs import PAIR, parse_pair
from tandem.spec.data import DatasetData, FileData
from tandem.types import Message

LABELS = ("label", "thumbs_up", "thumbs", "feedback")
"""The columns that may hold the label, in the order in which they are looked for."""
_GOOD = frozenset(("true", "1", "1.0", "+1", "yes", "good", "up", "thumbs_up", "thumbs up", "like", "positive", "👍"))
_BAD = frozenset(
    ("false", "0", "0.0", "-1", "-1.0", "no", "bad", "down", "thumbs_down", "thumbs down", "dislike", "negative", "👎")
)


@dataclass(frozen=True, slots=True)
class RatedAnswer:
    messages: tuple[Message, ...]
    good: bool


@dataclass(frozen=True, slots=True)
class Rated(FromSource):
    """A prompt, and an answer with its label. A pair of answers is both: the chosen one is good, the rejected bad."""

    prompt: tuple[Message, ...]
    answers: tuple[RatedAnswer, ...]

    @property
    def key(self) -> tuple[Message, ...]:
        """The prompt: answers to the same prompt must be on one side of the split."""
        return self.prompt


def load_rated(spec: FileData | DatasetData, field_name: str = "data") -> DataSplit[Rated]:
    return load(spec, field_name, RATED)


def parse_rated(row: object) -> tuple[tuple[Message, ...], tuple[RatedAnswer, ...]]:
    """Return the prompt and the labelled answers of a conversation with a label, or of a pair; ignore other columns.

    The answer is the completion of a prompt, or the last turn of a chat.
    """
    row = as_object(row)
    if _is_pair(row):
        prompt, chosen, rejected = parse_pair(row)
        return prompt, (RatedAnswer(chosen, good=True), RatedAnswer(rejected, good=False))
    name = _label_of(row)
    if not name:
        raise BadRow(f"no label in its columns ({', '.join(map(str, row))})")
    messages = parse_row(row)
    length = len(said_by(row["completion"], "assistant")) if shape_of(row) == PROMPT_COMPLETION else 1
    prompt, answer = messages[:-length], messages[-length:]
    if not prompt:
        raise BadRow("no prompt before the answer")
    return prompt, (RatedAnswer(answer, good=_is_good(name, row[name])),)


def _is_pair(row: Mapping[Any, Any]) -> bool:
    return row.get("chosen") is not None and row.get("rejected") is not None


def _label_of(row: Mapping[Any, Any]) -> str:
    return next((name for name in LABELS if row.get(name) is not None), "")


def _is_good(name: str, value: object) -> bool:
    text = str(value).strip().lower()
    if text not in _GOOD | _BAD:
        raise BadRow(f"{name} is neither good nor bad; write true or false, 1 or 0, up or down, good or bad")
    return text in _GOOD


def _named(row: Mapping[Any, Any]) -> str:
    return "chosen and rejected" if _is_pair(row) else f"{SHAPES[shape_of(row)]} with {_label_of(row)}"


RATED = RowFormat(
    "answer",
    (*((*shape, *LABELS) for shape in (CHAT, SHAREGPT, PROMPT_COMPLETION, ALPACA)), PAIR),
    lambda row, number, source: Rated(*parse_rated(row), row=number, source=source),
    _named,
    '{ prompt = "question", completion = "answer", label = "thumb" }',
)
