"""Objects that Python passes to a run: each gets a name in the spec, under which the run's parts find it.

A spec with such a name is complete, so reports, digests and comparisons read it as any other. Only who resumes the run
must pass the same objects again: a run directory has no pickled code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from tandem.errors import SpecError
from tandem.io import own_code
from tandem.io.own_code import OBJECT
from tandem.obs.trackers.tracker_process import Client
from tandem.protocols import Algorithm, Callback, Environment, OptimizerRule
from tandem.spec.load import AnySpec, as_spec, parse_spec
from tandem.spec.own import beside, own_names
from tandem.spec.run import RlSpec, RunSpec
from tandem.spec.toml import read_toml

AnyAlgorithm: TypeAlias = Algorithm | Callable[..., Any]
"""An Algorithm, or a loss function."""


@dataclass(frozen=True, slots=True)
class Objects:
    environment: Environment | None = None
    algorithm: AnyAlgorithm | None = None
    optimizer: OptimizerRule | None = None
    callbacks: Sequence[Callback] = ()
    trackers: Sequence[Client] = ()

    def named(self) -> dict[str, tuple[str, Any]]:
        """Return each object with its name, by the argument that passed it; in a list the argument has a number."""
        single = {"environment": self.environment, "algorithm": self.algorithm, "optimizer": self.optimizer}
        found = {key: (own_code.object_name(each), each) for key, each in single.items() if each is not None}
        for key, several in (("callbacks", self.callbacks), ("trackers", self.trackers)):
            for number, each in enumerate(several):
                name, seen = own_code.object_name(each), {known for known, _ in found.values()}
                copies = sum(known == name or known.startswith(f"{name}#") for known in seen)
                found[f"{key}[{number}]"] = (f"{name}#{copies + 1}" if copies else name, each)
        return found

    def by_name(self) -> dict[str, Any]:
        return dict(self.named().values())


def with_objects(spec: AnySpec, objects: Objects) -> RunSpec:
    """Return the checked spec, with the names of the objects in it."""
    named = objects.named()
    if not named:
        return as_spec(spec)
    where = None
    if isinstance(spec, Mapping):
        raw = dict(spec)
    elif isinstance(spec, str | Path):
        raw, where = read_toml(spec), Path(spec).parent
    else:
        raw = spec.as_written()
    for argument, (name, _) in named.items():
        _put(raw, argument, name)
    checked = parse_spec(raw)
    _refuse_other_processes(checked, named)
    return checked if where is None else beside(checked, where)


def check_same(spec: RunSpec, objects: Objects) -> None:
    """Raise SpecError if a resumed run gets other objects than it began with."""
    began = [name for _, name in own_names(spec) if name.startswith(OBJECT)]
    given = objects.by_name()
    if missing := [name for name in began if name not in given]:
        began_with, got = (", ".join(map(own_code.short, names)) or "none" for names in (missing, given))
        raise SpecError(
            f"resume: the run began with {began_with}, and got {got}; pass the same objects to tandem.resume(DIR, ...)"
        )
    if other := [name for name in given if name not in began]:
        raise SpecError(f"resume: the run began without {own_code.short(other[0])}; leave it out")


def _put(raw: dict[str, Any], argument: str, name: str) -> None:
    """Write the name of an object into the tables of a spec."""
    kind = argument.partition("[")[0]
    if kind == "environment":
        table = _table(raw, "environment")
        if "name" in table:
            raise _twice("environment.name", table["name"], argument)
        table["name"] = name
    elif kind == "algorithm":
        if "algorithm" in raw:
            raise _twice("algorithm", raw["algorithm"], argument)
        raw["algorithm"] = {"kind": "own", "name": name}
    elif kind == "optimizer":
        table = _table(raw, "train")
        if "optimizer" in table:
            raise _twice("train.optimizer", table["optimizer"], argument)
        table["optimizer"] = {"kind": "own", "name": name}
    elif kind == "callbacks":
        raw["callbacks"] = [*raw.get("callbacks", ()), name]
    else:
        table = _table(raw, "track")
        table["to"] = [*table.get("to", ()), name]


def _table(raw: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a copy of a table that may be written to, in its place."""
    found = raw.get(key, {})
    raw[key] = dict(cast("Mapping[str, Any]", found)) if isinstance(found, Mapping) else {}
    return raw[key]


def _twice(field: str, value: Any, argument: str) -> SpecError:
    return SpecError(f"{field} = {value!r}: the spec has one, and {argument}=... was passed; leave one of them out")


def _refuse_other_processes(spec: RunSpec, named: Mapping[str, Any]) -> None:
    """Raise SpecError for an object that another process would need."""
    if isinstance(spec, RlSpec) and spec.environment is not None and "environment" in named:
        if spec.environment.workers:
            raise SpecError(
                f"environment.workers = {spec.environment.workers}: worker processes cannot get an object of this one; "
                "set workers = 0, or put the class into a file and name it: environment.name = 'file.py:Class'"
            )
        if spec.environment.params:
            raise SpecError(
                f"environment.params = {spec.environment.params}: the environment is made already; leave it out"
            )
    for argument in ("algorithm", "optimizer"):
        if argument in named and spec.parallel.ranks > 1:
            raise SpecError(
                f"parallel.ranks = {spec.parallel.ranks}: the other ranks cannot get the object {argument}=...; put it "
                "into a file and name it in the spec: 'file.py:name'"
            )
