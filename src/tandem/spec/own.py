"""Names of a user's own code in a spec: `file.py:name`, relative to the spec's file or to the command's directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator

from tandem.spec.base import LocalPath, Spec

_OWN = re.compile(r"(.+\.py:[A-Za-z_]\w*|object:.+)")

S = TypeVar("S", bound=Spec)


def is_own(name: object) -> bool:
    return isinstance(name, str) and _OWN.fullmatch(name) is not None


def _checked(name: str) -> str:
    if name and not is_own(name):
        raise ValueError("names no code of your own; write path/to/file.py:name")
    return name


OwnName = Annotated[str, AfterValidator(_checked), LocalPath("file:Class")]


def as_own(raw: Any) -> Any:
    """Turn a table that names a file, as `name` or as `kind`, into one of kind "own"."""
    if not isinstance(raw, Mapping):
        return raw
    table = cast("Mapping[str, Any]", raw)
    if is_own(table.get("kind")) and "name" not in table:
        return {**table, "kind": "own", "name": table["kind"]}
    if "kind" not in table and {"name", "credit", "keep"} & table.keys():
        return {"kind": "own", **table}
    return table


def with_kinds(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a spec, with kind "own" in those that name a file."""
    tables = dict(raw)
    if "algorithm" in tables:
        tables["algorithm"] = as_own(tables["algorithm"])
    for stage in ("train", "warmup"):
        if isinstance(table := tables.get(stage), Mapping) and "optimizer" in table:
            tables[stage] = {**table, "optimizer": as_own(table["optimizer"])}
    return tables


def own_names(spec: Spec, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each field of a spec that names a user's code, with the name."""
    for field, value in spec:
        where = f"{path}.{field}" if path else field
        if isinstance(value, Spec):
            yield from own_names(value, where)
            continue
        several = isinstance(value, tuple | list)
        for number, each in enumerate(cast("tuple[Any, ...]", value) if several else (value,)):
            if _is_marked(type(spec), field) and (is_own(each) or each.endswith(".py")):
                yield (f"{where}[{number}]" if several else where), each


def beside(spec: S, directory: Path) -> S:
    """Return a copy in which every file of a user's code that lies beside the spec's file has its absolute path."""
    changed: dict[str, Any] = {}
    for field, value in spec:
        if isinstance(value, Spec):
            changed[field] = beside(value, directory)
        elif _is_marked(type(spec), field):
            if isinstance(value, tuple | list):
                names = cast("tuple[str, ...]", value)
                changed[field] = type(names)(_found(each, directory) for each in names)
            else:
                changed[field] = _found(value, directory)
    return spec.changed(changed)


def _is_marked(kind: type[Spec], field: str) -> bool:
    return any(isinstance(each, LocalPath) and each.kind == "file:Class" for each in kind.model_fields[field].metadata)


def _found(name: str, directory: Path) -> str:
    file, _, _ = name.rpartition(":") if not name.endswith(".py") else (name, "", "")
    path = (directory / file).absolute()
    return f"{path}{name[len(file) :]}" if file.endswith(".py") and path.is_file() else name
