"""Load the rows of a `[data]` table, and split them into training and held-out rows."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tandem.data.columns import renamer, sources_of
from tandem.data.conversation import (
    IMAGE_COLUMNS,
    SHAPES,
    BadRow,
    Conversation,
    as_object,
    check_columns,
    located,
    parse_row,
    shape_of,
)
from tandem.data.datasets_rows import read_dataset
from tandem.data.file_rows import read_file
from tandem.data.row_report import ValidationReport
from tandem.errors import DataError, ImageError
from tandem.spec.data import DatasetData, FileData
from tandem.types import Message

Source = tuple[str, Iterator[tuple[int, object]]]
"""A source: its name for the report, and its numbered rows."""

KeepImages = Callable[[tuple[Message, ...]], tuple[Message, ...]]


class DataRow(Protocol):
    """A parsed row."""

    @property
    def row(self) -> int: ...
    @property
    def source(self) -> str: ...
    @property
    def key(self) -> object:
        """A JSON value. Rows with equal keys are never on both sides of the split."""
        ...


R = TypeVar("R", bound=DataRow)

_LEAST_HELD_OUT = 8  # rows; fewer than six changes cannot show an effect (runs/verdict.py)


@dataclass(frozen=True, slots=True)
class RowFormat(Generic[R]):
    """How to read one kind of rows."""

    noun: str
    families: tuple[tuple[str, ...], ...]
    """The columns to read of a table, in families: a row is read by one of them. Empty: all columns."""
    understand: Callable[[object, int, str], R]
    """Parses a raw row, with its number and source; raises BadRow with the reason."""
    named: Callable[[Mapping[Any, Any]], str]
    """Says what kind of row an understood one is."""
    example: str
    """A mapping of columns, for errors."""


CONVERSATIONS = RowFormat(
    "conversation",
    tuple(SHAPES),
    lambda row, number, source: Conversation(parse_row(row), row=number, source=source),
    lambda row: SHAPES[shape_of(row)],
    '{ prompt = "question", completion = "answer" }',
)


@dataclass(frozen=True, slots=True)
class DataSplit(Generic[R]):
    """Training and held-out rows, without common keys, and the report."""

    train: list[R]
    held_out: list[R]
    report: ValidationReport

    def without(self, reason_of: Callable[[R], str]) -> DataSplit[R]:
        """Leave out, and report, each row for which `reason_of` returns a reason."""

        def fine(row: R) -> bool:
            if reason := reason_of(row):
                self.report.drop(row.source, row.row, reason)
            return not reason

        return DataSplit(list(filter(fine, self.train)), list(filter(fine, self.held_out)), self.report)


def load_rows(
    spec: FileData | DatasetData, field_name: str = "data", keep_images: KeepImages | None = None, *, sees: bool = False
) -> DataSplit[Conversation]:
    """Conversations. `keep_images`: keeps the images of messages, and returns the messages with digests for them; None:
    rows with images are bad rows. `load` explains `sees`."""
    if keep_images is None:
        return load(spec, field_name, CONVERSATIONS)

    def understood(row: object, number: int, source: str) -> Conversation:
        found = located(parse_row(row, images=True), Path(source).parent if isinstance(spec, FileData) else None)
        try:
            kept = keep_images(found)
        except ImageError as error:
            raise BadRow(str(error)) from error
        return Conversation(kept, row=number, source=source)

    return load(spec, field_name, replace(CONVERSATIONS, understand=understood), sees=sees)


def load(spec: FileData | DatasetData, field_name: str, shape: RowFormat[R], *, sees: bool = False) -> DataSplit[R]:
    """Read, check and split the rows. DataError for a bad row, unless the spec allows bad rows. `sees`: images in
    columns of their own are an error."""
    report = ValidationReport()
    renamed = renamer(spec.columns, shape.families, field_name)
    rename = (lambda row: check_columns(renamed(row))) if sees else renamed
    known = {name for family in shape.families for name in family}
    columns = sorted(known | {*sources_of(spec.columns), *(IMAGE_COLUMNS if sees else ())}) if known else None
    name, rows = _training_source(spec, columns, field_name)
    train = _read(name, islice(rows, spec.max_examples or None), rename, shape, report)
    eval_source = _eval_source(spec, columns, field_name)
    if eval_source is None:
        train, held_out = _hold_out(train, spec.eval_share)
    else:
        held_out = _read(*eval_source, rename, shape, report)
        train = _drop_held_out(train, held_out, report)
    if report.dropped and not spec.allow_bad_rows:
        way_out = f"correct these rows, or skip them: {field_name}.allow_bad_rows = true"
        if not report.kinds and not any("an image" in reason for reason in report.by_reason()):
            way_out = f"say which column holds what, as in {field_name}.columns = {shape.example}"
        raise DataError(f"{field_name}: {report.text()}\n{way_out}")
    if not train or (eval_source and not held_out):
        use = "evaluate" if train else "train"
        raise DataError(f"{field_name}: no {shape.noun} to {use} on; give it rows that can be used\n{report.text()}")
    return DataSplit(train, held_out, report)


def _training_source(spec: FileData | DatasetData, columns: Sequence[str] | None, field_name: str) -> Source:
    if isinstance(spec, FileData):
        return spec.path, read_file(Path(spec.path), columns, f"{field_name}.path")
    rows = read_dataset(spec.name, spec.subset, spec.split, columns, field_name)
    return f"{spec.name}[{spec.split}]", enumerate(rows, start=1)


def _eval_source(spec: FileData | DatasetData, columns: Sequence[str] | None, field_name: str) -> Source | None:
    if isinstance(spec, FileData):
        where = f"{field_name}.eval_path"
        return (spec.eval_path, read_file(Path(spec.eval_path), columns, where)) if spec.eval_path else None
    if not spec.eval_split:
        return None
    rows = read_dataset(spec.name, spec.subset, spec.eval_split, columns, field_name)
    return f"{spec.name}[{spec.eval_split}]", enumerate(rows, start=1)


def _read(
    source: str,
    rows: Iterator[tuple[int, object]],
    rename: Callable[[object], object],
    shape: RowFormat[R],
    report: ValidationReport,
) -> list[R]:
    found: list[R] = []
    for number, raw in rows:
        report.read += 1
        try:
            row = rename(raw)
            found.append(shape.understand(row, number, source))
            report.kinds[shape.named(as_object(row))] += 1
        except BadRow as bad:
            report.drop(source, number, str(bad))
    return found


def _hold_out(rows: list[R], share: float) -> tuple[list[R], list[R]]:
    """Hold out the share with the smallest digests, so that the choice does not depend on the order of rows."""
    digests = [_digest(row) for row in rows]
    wanted = max(round(share * len(rows)), min(_LEAST_HELD_OUT, len(rows) // 4), 1) if share else 0
    rows_of = Counter(digests)
    chosen: set[bytes] = set()
    for digest in sorted(rows_of)[:-1]:  # without the last one: at least one row is trained on
        if wanted > 0:
            chosen.add(digest)
            wanted -= rows_of[digest]
    both = list(zip(rows, digests, strict=True))
    return [row for row, digest in both if digest not in chosen], [row for row, digest in both if digest in chosen]


def _drop_held_out(train: list[R], held_out: list[R], report: ValidationReport) -> list[R]:
    """Drop training rows that are also held out: they would make the held-out loss look too good."""
    digests = {_digest(row) for row in held_out}
    kept: list[R] = []
    for row in train:
        if _digest(row) in digests:
            report.drop(row.source, row.row, "also among the held-out rows")
        else:
            kept.append(row)
    return kept


def _digest(row: DataRow) -> bytes:
    return hashlib.sha256(json.dumps(row.key, sort_keys=True).encode()).digest()
