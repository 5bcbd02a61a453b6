"""Read the rows of JSON Lines and parquet files, with their numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.data.conversation import BadRow
from tandem.data.parquet_rows import read_parquet
from tandem.errors import DataError


def read_file(path: Path, columns: Sequence[str], field_name: str) -> Iterator[tuple[int, object]]:
    """Yield rows with their numbers, from 1; an unreadable line is yielded as a BadRow with the reason.

    Of a parquet file, only `columns` are read.
    """
    refuse_no_file(path, field_name)
    if path.suffix == ".parquet":
        return enumerate(read_parquet(path, columns, field_name), start=1)
    return _read_jsonl(path)


def refuse_no_file(path: Path, field_name: str) -> None:
    if not os.path.isfile(path):
        raise DataError(f"{field_name} = '{path}': no such file in {Path.cwd()}; give a .jsonl or .parquet file")
    if not os.access(path, os.R_OK):
        raise DataError(f"{field_name} = '{path}': cannot be read: permission denied")


def _read_jsonl(path: Path) -> Iterator[tuple[int, object]]:
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
