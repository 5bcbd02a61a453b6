"""Give a row's columns the names that its reader knows: `columns = { prompt = "question" }` of a `[data]` table."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.data.conversation import BadRow, as_object
from tandem.errors import DataError

_FIELD = re.compile(r"\{([^{}]+)\}")

Families = Sequence[tuple[str, ...]]
"""Columns that belong together: a row is read by one family, so those of the others are put aside."""


def sources_of(columns: Mapping[str, str]) -> list[str]:
    """Return the columns of the file that a mapping reads."""
    return [name for value in columns.values() for name in _fields(value) or [value]]


def renamer(columns: Mapping[str, str], families: Families, field_name: str) -> Callable[[object], object]:
    """Return a function that adds the mapped columns to a raw row. Unknown names on the left are refused, unless
    `families` is empty."""
    known = [name for family in families for name in family]
    for target, source in columns.items():
        if known and target not in known:
            close = difflib.get_close_matches(target, known, n=1)
            swapped = f'write {source} = "{target}"; ' if source in known else ""
            hint = swapped or (f"did you mean '{close[0]}'? " if close else "")
            raise DataError(f'{field_name}.columns.{target} = "{source}": unknown; {hint}Known: {", ".join(known)}')
    if not columns:
        return lambda row: row
    used = {name for family in families if set(family) & columns.keys() for name in family}
    aside = set(known) - used

    def renamed(row: object) -> object:
        plain = as_object(row)
        kept = {name: value for name, value in plain.items() if name not in aside}
        return {**kept, **{target: _value(plain, source, target) for target, source in columns.items()}}

    return renamed


def _value(row: Mapping[Any, Any], source: str, target: str) -> object:
    fields = _fields(source)
    for name in fields or [source]:
        if name not in row:
            listed = ", ".join(map(str, row)) or "none"
            raise BadRow(f"no column '{name}' (columns.{target}); its columns: {listed}")
    if not fields:
        return row[source]
    return _FIELD.sub(lambda found: "" if row[found[1]] is None else str(row[found[1]]), source)


def _fields(source: str) -> list[str]:
    """Return the columns that a text has in braces; none if it is the name of a column."""
    return _FIELD.findall(source)
