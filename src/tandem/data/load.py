"""A `[data]` table becomes conversations to train on and conversations held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tandem.data.conversation import BadRow, Conversation, parse_row
from tandem.data.datasets_rows import read_dataset
from tandem.data.files import read_file
from tandem.data.report import ValidationReport
from tandem.errors import DataError
from tandem.spec.data import DatasetData, FileData

Source = tuple[str, Iterator[tuple[int, object]]]
"""Its name for the report, and its numbered rows."""


@dataclass(frozen=True, slots=True)
class Split:
    """No conversation is in both lists."""

    train: list[Conversation]
    held_out: list[Conversation]
    report: ValidationReport

    def without(self, reason_of: Callable[[Conversation], str]) -> Split:
        """Leave out, and report, each conversation that `reason_of` says something against."""

        def fine(conversation: Conversation) -> bool:
            if reason := reason_of(conversation):
                self.report.drop(conversation.source, conversation.row, reason)
            return not reason

        return Split(list(filter(fine, self.train)), list(filter(fine, self.held_out)), self.report)


def load_rows(spec: FileData | DatasetData, field_name: str = "data") -> Split:
    """Read, check and split. DataError for a bad row, unless the spec allows them."""
    report = ValidationReport()
    name, rows = _training_source(spec, field_name)
    train = _read(name, islice(rows, spec.max_examples or None), report)
    eval_source = _eval_source(spec, field_name)
    if eval_source is None:
        train, held_out = _hold_out(train, spec.eval_share)
    else:
        held_out = _read(*eval_source, report)
        train = _drop_held_out(train, held_out, report)
    if report.dropped and not spec.allow_bad_rows:
        way_out = f"mend these rows, or go on without them: {field_name}.allow_bad_rows = true"
        raise DataError(f"{field_name}: {report.text()}\n{way_out}")
    if not train or (eval_source and not held_out):
        use = "evaluate" if train else "train"
        raise DataError(f"{field_name}: no conversation to {use} on; give it rows that can be used\n{report.text()}")
    return Split(train, held_out, report)


def _training_source(spec: FileData | DatasetData, field_name: str) -> Source:
    if isinstance(spec, FileData):
        return spec.path, read_file(Path(spec.path), f"{field_name}.path")
    rows = read_dataset(spec.name, spec.subset, spec.split, field_name)
    return f"{spec.name}[{spec.split}]", enumerate(rows, start=1)


def _eval_source(spec: FileData | DatasetData, field_name: str) -> Source | None:
    if isinstance(spec, FileData):
        return (spec.eval_path, read_file(Path(spec.eval_path), f"{field_name}.eval_path")) if spec.eval_path else None
    if not spec.eval_split:
        return None
    rows = read_dataset(spec.name, spec.subset, spec.eval_split, field_name)
    return f"{spec.name}[{spec.eval_split}]", enumerate(rows, start=1)


def _read(source: str, rows: Iterator[tuple[int, object]], report: ValidationReport) -> list[Conversation]:
    conversations: list[Conversation] = []
    for number, row in rows:
        report.read += 1
        try:
            conversations.append(Conversation(parse_row(row), number, source))
        except BadRow as bad:
            report.drop(source, number, str(bad))
    return conversations


def _hold_out(conversations: list[Conversation], share: float) -> tuple[list[Conversation], list[Conversation]]:
    """The share with the smallest digests: the same rows whatever their order, and duplicates on one side."""
    digests = [_digest(conversation) for conversation in conversations]
    count = max(1, round(share * len(digests))) if share and len(set(digests)) > 1 else 0
    chosen = set(sorted(digests)[:count])
    both = list(zip(conversations, digests, strict=True))
    return [c for c, digest in both if digest not in chosen], [c for c, digest in both if digest in chosen]


def _drop_held_out(
    train: list[Conversation], held_out: list[Conversation], report: ValidationReport
) -> list[Conversation]:
    """What is in both would make the held-out loss look better than it is."""
    digests = {_digest(conversation) for conversation in held_out}
    kept: list[Conversation] = []
    for conversation in train:
        if _digest(conversation) in digests:
            report.drop(conversation.source, conversation.row, "also among the held-out rows")
        else:
            kept.append(conversation)
    return kept


def _digest(conversation: Conversation) -> bytes:
    return hashlib.sha256(json.dumps(conversation.messages, sort_keys=True).encode()).digest()
