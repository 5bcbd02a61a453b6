"""Names of a user's own code in a spec: `file.py:name`, relative to the spec's file or to the command's directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, Field, model_validator

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


class OwnAlgorithmSpec(Spec):
    """An algorithm of your own, from files: its loss, its advantages (`credit`), its filter (`keep`), or some of them.
    docs/your_own.md says how each is called."""

    kind: Literal["own"] = "own"
    name: OwnName = ""
    """The loss, as `file.py:function`, or a whole `tandem.Algorithm`, as `file.py:object`. Empty: the loss of dr_grpo
    with its defaults, or in SFT that of SFT."""
    credit: OwnName = ""
    """The function that turns rewards into advantages. Empty: reward minus the group's mean; in SFT 1; of a pair 1 for
    the better answer and -1 for the other."""
    keep: OwnName = ""
    """The function that says whether a group teaches anything; in RL only. Empty: groups whose rewards differ do."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments: each goes to those of the functions that take it; one that none takes is refused."""
    reference: bool = False
    """true: keep a frozen copy of the weights that RL (SFT, preference training) began with; its logprobs are
    `micro.reference_N`."""

    @model_validator(mode="after")
    def _names_something(self) -> OwnAlgorithmSpec:
        if not (self.name or self.credit or self.keep):
            raise ValueError("names no code of your own; add name, credit or keep, each as path/to/file.py:function")
        return self


def check_recorded(algorithm: OwnAlgorithmSpec) -> None:
    """Raise ValueError for what an algorithm of one's own cannot do on recorded rows."""
    if algorithm.keep:
        raise ValueError(
            f"algorithm.keep = '{algorithm.keep}': recorded rows are all trained on; leave it out, and take unwanted "
            "rows out of the data"
        )


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
