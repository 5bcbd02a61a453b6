"""Read the rows of a file with their numbers: JSON Lines, JSON, CSV, TSV, parquet or plain text."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from tandem.data.conversation import BadRow
from tandem.data.parquet_rows import read_parquet
from tandem.errors import DataError
from tandem.spec.data import SUFFIXES

_LONGEST_CELL = 2**30  # characters of a CSV cell; the csv module's own limit of 131,072 is shorter than many documents
_DELIMITERS = ",;\t|"

Rows = Iterator[tuple[int, object]]


def read_file(path: Path, columns: Sequence[str] | None, field_name: str) -> Rows:
    """Yield rows with their numbers, from 1; an unreadable row is yielded as a BadRow with the reason.

    Of a parquet file, only `columns` are read; None: all of them.
    """
    refuse_no_file(path, field_name)
    match path.suffix.lower():
        case ".parquet":
            return enumerate(read_parquet(path, columns, field_name), start=1)
        case ".csv" | ".tsv":
            return _read_csv(path, field_name)
        case ".json":
            return _read_json(path, field_name)
        case ".txt":
            return _read_text(path)
        case _:
            return _read_jsonl(path)


def refuse_no_file(path: Path, field_name: str) -> None:
    if os.path.isdir(path):
        raise DataError(f"{field_name} = '{path}': is a directory; name = '{path}' reads its data files")
    if not os.path.isfile(path):
        kinds = ", ".join(SUFFIXES)
        raise DataError(f"{field_name} = '{path}': no such file in {Path.cwd()}; give the path of one of {kinds}")
    if not os.access(path, os.R_OK):
        raise DataError(f"{field_name} = '{path}': cannot be read: permission denied")


def _read_jsonl(path: Path) -> Rows:
    """Yield a row per line, so that a bad line does not affect others. Empty lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parse_line(line)


def _parse_line(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return BadRow("not UTF-8")
    except (ValueError, RecursionError):
        return BadRow("not JSON")


def _read_json(path: Path, field_name: str) -> Rows:
    """Read a list of rows, or an object whose only list is the rows. Many files named .json hold JSON Lines."""
    try:
        whole = json.loads(_text(path, field_name))
    except (ValueError, RecursionError) as error:
        first = next(iter(_read_jsonl(path)), (0, BadRow("")))[1]
        if isinstance(first, dict):
            return _read_jsonl(path)
        raise DataError(f"{field_name} = '{path}': is neither JSON nor JSON Lines: {error}") from error
    lists = [whole] if isinstance(whole, list) else []
    if isinstance(whole, dict):
        lists = [value for value in cast("dict[str, Any]", whole).values() if isinstance(value, list)]
    if len(lists) != 1:
        raise DataError(
            f"{field_name} = '{path}': holds {type(whole).__name__} with {len(lists)} lists; write a list of rows, as "
            'in [{"prompt": "...", "completion": "..."}]'
        )
    return enumerate(cast("list[object]", lists[0]), start=1)


def _read_csv(path: Path, field_name: str) -> Rows:
    """Read rows by the names in the first line. The delimiter is the one of , ; | and tab that is most often in it."""
    csv.field_size_limit(_LONGEST_CELL)
    text = _text(path, field_name)
    if not text.strip():
        raise DataError(f"{field_name} = '{path}': is empty; its first line names the columns")
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(_DELIMITERS, key=text.partition("\n")[0].count)
    table = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        header = [name.strip() for name in next(table)]
    except csv.Error as error:
        raise DataError(f"{field_name} = '{path}': its first line is not CSV: {error}") from error
    if len(set(header)) != len(header) or not all(header):
        raise DataError(f"{field_name} = '{path}': its first line must name each column once; it has {header}")
    return _csv_rows(table, header)


def _csv_rows(table: Any, header: Sequence[str]) -> Rows:
    while True:
        first = table.line_num + 1  # a cell may hold line breaks; the row is where it begins
        try:
            cells = next(table, None)
        except csv.Error as error:
            yield first, BadRow(f"not CSV: {error}")
            continue
        if cells is None:
            return
        if not cells:
            continue
        if len(cells) != len(header):
            yield first, BadRow(f"{len(cells)} cells, where the first line names {len(header)} columns")
        else:
            yield first, dict(zip(header, cells, strict=True))


def _read_text(path: Path) -> Rows:
    """Yield each line that is not blank as a row with one column, `text`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig").strip()
            except UnicodeDecodeError:
                yield number, BadRow("not UTF-8")
                continue
            if text:
                yield number, {"text": text}


def _text(path: Path, field_name: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{field_name} = '{path}': is not UTF-8 (byte {error.start}); save it as UTF-8, or convert it: iconv -f "
            f"WINDOWS-1252 -t UTF-8 {path.name}"
        ) from error
