"""Load an environment by name: built in, `package.module:Class`, `path/to/file.py`, `path/to/file.py:Class`, or one of
another library by an adapter, as `gymnasium:FrozenLake-v1`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from tandem.env.builtin.arithmetic import Arithmetic
from tandem.env.builtin.count import Count
from tandem.env.builtin.guess import Guess
from tandem.env.builtin.sort import Sort
from tandem.env.protocol_check import check_environment, their_code, wrong
from tandem.errors import EnvironmentFailed, SpecError
from tandem.io import own_code
from tandem.io.own_code import OBJECT, import_file
from tandem.protocols import Environment
from tandem.spec.load import plain_message
from tandem.spec.package_names import is_package

BUILT_IN: dict[str, type] = {"arithmetic": Arithmetic, "count": Count, "guess": Guess, "sort": Sort}

ADAPTERS = {
    "gsm8k": "tandem.env.adapters.maths:Gsm8k",
    "math": "tandem.env.adapters.maths:Math",
    "gymnasium": "tandem.env.adapters.gymnasium:Gymnasium",
    "mix": "tandem.env.mix:Mix",
    "prompts": "tandem.env.prompts.environment:Prompts",
    "openenv": "tandem.env.adapters.openenv:OpenEnv",
    "reasoning_gym": "tandem.env.adapters.reasoning_gym:ReasoningGym",
    "verifiers": "tandem.env.adapters.verifiers:Verifiers",
}
"""Adapters by the part before the colon. The part after it is the class's parameter `id`; gsm8k, math, prompts
and mix have none."""


def load_environment(name: str | Path, params: Mapping[str, Any] | None = None) -> Environment:
    """Find the class, check the parameters, make an instance. An environment that is not built in is checked too."""
    name = str(name)
    if name.startswith(OBJECT):
        passed = own_code.load("environment.name", name)
        check_environment(passed, own_code.short(name))
        return passed
    params = {**(params or {}), **_adapter_id(name, params or {})}
    found = BUILT_IN.get(name) or _find_class(name)
    _check_params(found, name, params)
    with their_code(name, f"{found.__name__}(...)"):
        environment = cast(Environment, found(**params))
    if name not in BUILT_IN:
        check_environment(environment, name)
    return environment


def _adapter_id(name: str, params: Mapping[str, Any]) -> dict[str, str]:
    adapter, colon, its_id = name.partition(":")
    if adapter not in ADAPTERS or not colon:
        return {}
    if "id" in params:
        raise SpecError(
            f"environment.params.id = {_show(params['id'])}: remove it; environment.name = '{name}' sets it"
        )
    return {"id": its_id}


def _find_class(name: str) -> type:
    if (adapter := name.partition(":")[0]) in ADAPTERS:
        module, _, class_name = ADAPTERS[adapter].partition(":")
        return getattr(importlib.import_module(module), class_name)
    place, _, class_name = name.rpartition(":")
    if name.endswith(".py"):
        return _only_class(_import_file(name, Path(name)), name)
    if place.endswith(".py"):
        return _named_class(_import_file(name, Path(place)), name, class_name)
    if place and class_name:
        return _named_class(_import_module(name, place), name, class_name)
    if is_package(name):
        raise wrong(
            name, "is a package, whose code plays in the sandbox of a run only; name it in a spec's [environment]"
        )
    close = difflib.get_close_matches(name, [*BUILT_IN, *ADAPTERS], n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    known = ", ".join([*BUILT_IN, "prompts", "gsm8k", "math"])
    raise wrong(name, f"unknown; {hint}Built in: {known}; your own: package.module:Class or path/to/file.py")


def _import_module(name: str, module: str) -> ModuleType:
    try:
        with their_code(name, "importing it"):
            return importlib.import_module(module)
    except EnvironmentFailed as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(
            f"{missing}."
        ):  # it or its package is missing, not a module that it imports
            text = f"no module '{missing}'; install its package, or give its file: path/to/file.py:Class"
            raise wrong(name, text) from error
        raise


def _import_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise wrong(name, f"no such file in {Path.cwd()}; `tandem env new {path.stem}` writes a template")
    with their_code(name, "importing it"):
        return import_file(path)


def _classes(module: ModuleType) -> dict[str, type]:
    """Return the environment classes that the module defines itself, not those that it imports."""
    own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return {key: value for key, value in own.items() if _is_environment(value)}


def _is_environment(value: Any) -> bool:
    return inspect.isclass(value) and hasattr(value, "tasks") and hasattr(value, "run")


def _only_class(module: ModuleType, name: str) -> type:
    found = _classes(module)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise wrong(name, "no class in it has tasks and run; see docs/environments.md, or `tandem env new NAME`")
    raise wrong(name, f"it has several environments; choose one: {', '.join(f'{name}:{key}' for key in found)}")


def _named_class(module: ModuleType, name: str, class_name: str) -> type:
    value = getattr(module, class_name, None)
    if value is not None and _is_environment(value):
        return cast(type, value)
    problem = f"no class '{class_name}' in it" if value is None else f"'{class_name}' is not a class with tasks and run"
    raise wrong(name, f"{problem}; its environments: {', '.join(_classes(module)) or 'none'}")


def _check_params(environment: type, name: str, params: Mapping[str, Any]) -> None:
    known = inspect.signature(environment).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    with their_code(name, f"reading the parameter types of {environment.__name__}"):
        hints = typing.get_type_hints(cast(Any, environment).__init__)
    for key, value in params.items():
        if key not in known and not takes_any:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{close[0]}'? " if close else ""
            listed = ", ".join(known) or "none"
            raise SpecError(f"environment.params.{key} = {_show(value)}: unknown to '{name}'; {hint}Known: {listed}")
        _check_type(key, value, hints.get(key, Any))
    for key, parameter in known.items():
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.KEYWORD_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        if needed and key not in params:
            raise SpecError(f"environment.params.{key}: is missing; '{name}' requires it")


def _check_type(key: str, value: Any, annotation: Any) -> None:
    """Check a parameter's type here, where the error can name it."""
    try:
        # As JSON, whose arrays fit tuples too: TOML has only one kind of list.
        TypeAdapter(annotation).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise SpecError(f"environment.params.{key} = {_show(value)}: {plain_message(error.errors()[0])}") from error


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
