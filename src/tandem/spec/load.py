"""TOML and `--set` to a checked spec, and errors that name the field, the value and the way out."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from tandem.errors import SpecError
from tandem.spec.run import RlSpec, RunSpec, SftSpec

_ADAPTER: TypeAdapter[RlSpec | SftSpec] = TypeAdapter(RunSpec)


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> RlSpec | SftSpec:
    """Read a TOML file, apply `key.path=value` overrides, check everything."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); give the path of a spec, as in examples/quickstart.toml") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: is not TOML: {error}") from error
    for override in overrides:
        _apply(raw, override)
    return parse_spec(raw)


def parse_spec(raw: Mapping[str, Any]) -> RlSpec | SftSpec:
    if raw.get("recipe") not in ("rl", "sft"):
        raise SpecError(f'recipe = {_show(raw.get("recipe"))}: the first line of a spec says what to do; write recipe = "rl" or recipe = "sft"')
    try:
        return _ADAPTER.validate_python(dict(raw))
    except ValidationError as error:
        raise SpecError("\n".join(_explain(item, raw) for item in error.errors(include_url=False))) from error


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`key.path=value` strings as nested tables."""
    raw: dict[str, Any] = {}
    for override in overrides:
        _apply(raw, override)
    return raw


def json_schema() -> dict[str, Any]:
    return _ADAPTER.json_schema()


def to_toml(spec: BaseModel) -> str:
    """The whole spec, defaults included, as TOML that loads to an equal spec."""
    return "\n".join(_toml_table(spec.model_dump(mode="json", exclude_none=True), ())) + "\n"


def _toml_table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"[{'.'.join(map(_toml_key, path))}]"] if path else []
    lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", *_toml_table(value, (*path, key))]
    return lines


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise SpecError(f"--set {override}: write key.path=value, as in --set train.lr=1e-4")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: --set model.preset=small
    table = raw
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise SpecError(f"--set {override}: '{part}' is a value in this spec, not a table")
    table[parts[-1]] = value


def _explain(item: Any, raw: Mapping[str, Any]) -> str:
    where = _written_path(item["loc"], raw)
    field = ".".join(where) or "spec"
    kind, message = item["type"], item["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        known = _known_keys(item["loc"], raw)
        close = difflib.get_close_matches(where[-1], known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else "remove it"
        return f"{field} = {_show(item['input'])}: unknown here; {hint} Known: {', '.join(known)}"
    if kind == "missing":
        return f"{field}: is missing; add it (see `tandem spec schema`)"
    if kind == "value_error":
        return message if not where else f"{field} = {_show(item['input'])}: {message}"
    return f"{field} = {_show(item['input'])}: {message[0].lower()}{message[1:]}"


def _written_path(loc: Sequence[Any], raw: Any) -> list[str]:
    """Pydantic's location without the union tags that nobody wrote."""
    path: list[str] = []
    here: Any = raw
    last = len(loc) - 1
    for index, part in enumerate(loc):
        if isinstance(here, Mapping) and part not in here and index < last:
            continue
        if index == 0 and part in ("rl", "sft"):
            continue
        path.append(str(part))
        if isinstance(here, Mapping):
            here = here.get(part)
        elif isinstance(here, Sequence) and isinstance(part, int) and part < len(here):
            here = here[part]
    return path


def _known_keys(loc: Sequence[Any], raw: Mapping[str, Any]) -> list[str]:
    """Keys of the table that the last part of `loc` stands in."""
    schema = json_schema()
    definitions = schema["$defs"]
    node: dict[str, Any] = definitions["RlSpec" if raw.get("recipe") == "rl" else "SftSpec"]
    here: Any = raw
    for part in _written_path(loc, raw)[:-1]:
        here = here.get(part, {}) if isinstance(here, Mapping) else {}
        node = _resolve(node.get("properties", {}).get(part, {}), here, definitions)
    return sorted(node.get("properties", {}))


def _resolve(node: dict[str, Any], value: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Follow references, and in a union take the member that the written value chose."""
    if "$ref" in node:
        return definitions[node["$ref"].rsplit("/", 1)[-1]]
    members = [_resolve(member, value, definitions) for member in node.get("oneOf", node.get("anyOf", []))]
    members = [member for member in members if "properties" in member]
    if not members:
        return node
    written = value if isinstance(value, Mapping) else {}

    def fit(member: dict[str, Any]) -> int:
        properties = member["properties"]
        kind = properties.get("kind", {})
        chosen = "kind" in written and written["kind"] in (kind.get("const"), *kind.get("enum", []))
        return 1000 * chosen + len(set(written) & set(properties)) + 100 * ("preset" in written and "preset" in properties)

    return max(members, key=fit)


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if value is not None else "(nothing)"
    return text if len(text) <= 80 else text[:77] + "..."
