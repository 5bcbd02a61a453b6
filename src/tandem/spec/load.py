"""Load a spec from TOML and `--set` overrides; errors name the field, the value and what to write instead."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import tomli_w
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from tandem.errors import SpecError
from tandem.spec import others_names
from tandem.spec.data import Demonstrations, data_beside
from tandem.spec.engine import HfEngineSpec, ServerEngineSpec, VllmEngineSpec
from tandem.spec.environment import JudgeSpec
from tandem.spec.own import beside, with_kinds
from tandem.spec.run import PreferenceSpec, RlSpec, RunSpec, SftSpec
from tandem.spec.toml import read_toml

Table: TypeAlias = dict[str, Any]
T = TypeVar("T")

AnySpec: TypeAlias = RlSpec | SftSpec | PreferenceSpec | Mapping[str, Any] | str | Path
"""A checked spec, a dict of its tables, or the path of its file."""

_ENGINE: TypeAdapter[ServerEngineSpec | VllmEngineSpec] = TypeAdapter(
    Annotated[ServerEngineSpec | VllmEngineSpec, Field(discriminator="kind")]
)
_OWN_ENGINE: TypeAdapter[HfEngineSpec | VllmEngineSpec] = TypeAdapter(
    Annotated[HfEngineSpec | VllmEngineSpec, Field(discriminator="kind")]
)
_JUDGE: TypeAdapter[JudgeSpec] = TypeAdapter(JudgeSpec)
_ADAPTER: TypeAdapter[RlSpec | SftSpec | PreferenceSpec] = TypeAdapter(RunSpec)
_DATA = 'data.path = "rows.jsonl" for a file, or data.name = "owner/name" for a data set of the hub'
_USUAL_LR = {  # as `tandem init` proposes them for a small model (runs/first_spec.py)
    "rl": {"full": "1e-5", "lora": "2e-4", "preset": "3e-4"},
    "sft": {"full": "1e-5", "lora": "1e-4", "preset": "2e-3"},
    "preference": {"full": "5e-6", "lora": "5e-5", "preset": "3e-4"},
}
_NOT_A_TABLE = ("model_type", "model_attributes_type", "dict_type")


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read a TOML file, apply `key.path=value` overrides and check the spec."""
    raw = read_toml(path)
    for override in overrides:
        _apply(raw, override)
    directory = Path(path).parent
    return _data_beside(beside(parse_spec(raw), directory), directory)


def _data_beside(spec: RunSpec, directory: Path) -> RunSpec:
    """Return the spec with the absolute paths of data that lies beside its file, in `directory`."""
    if not isinstance(spec, RlSpec):
        return spec.changed({"data": data_beside(spec.data, directory)})
    if spec.warmup is not None and not isinstance(spec.warmup.data, Demonstrations):
        warmup = spec.warmup.changed({"data": data_beside(spec.warmup.data, directory)})
        spec = spec.changed({"warmup": warmup})
    if spec.environment is not None:
        spec = spec.changed({"environment": spec.environment.beside(directory)})
    return spec


def as_spec(spec: AnySpec) -> RunSpec:
    """Return a checked spec: `spec` itself, or the one in a dict or in the TOML file of this path."""
    if isinstance(spec, Mapping):
        return parse_spec(spec)
    return load_spec(spec) if isinstance(spec, str | Path) else spec


def parse_spec(raw: Mapping[str, Any]) -> RunSpec:
    """Check a spec given as a dict, with the tables that a TOML file would have."""
    if raw.get("recipe") not in ("rl", "sft", "preference"):
        raise SpecError(
            f"recipe = {_show(raw.get('recipe'))}: the first line of a spec names the recipe; "
            f"{meant_recipe(raw.get('recipe'))}"
        )
    raw = with_kinds(raw)
    try:
        return _ADAPTER.validate_python(raw)
    except ValidationError as error:
        raise SpecError("\n".join(_explain(item, raw) for item in error.errors(include_url=False))) from error


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return `key.path=value` strings as nested tables."""
    raw: dict[str, Any] = {}
    for override in overrides:
        _apply(raw, override)
    return raw


def parse_engine(kind: str, overrides: Sequence[str]) -> ServerEngineSpec | VllmEngineSpec:
    """Return the checked `[engine]` table of a standalone engine, from command-line options."""
    return _of_options(_ENGINE, {"kind": kind, **parse_overrides(overrides)}, "--set")


def parse_own_engine(kind: str, overrides: Sequence[str]) -> HfEngineSpec | VllmEngineSpec:
    """Return the checked `[engine]` table of a process that serves a model, from command-line options."""
    return _of_options(_OWN_ENGINE, {"kind": kind, **parse_overrides(overrides)}, "--set")


def parse_judge(overrides: Sequence[str]) -> JudgeSpec:
    """Return the checked `[environment.judge]` table, from command-line options."""
    return _of_options(_JUDGE, {"kind": "none", **parse_overrides(overrides)}, "--judge")


def _of_options(kind: TypeAdapter[T], raw: Mapping[str, Any], option: str) -> T:
    try:
        return kind.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "kind"
        raise SpecError(f"{option} {field} = {_show(first['input'])}: {plain_message(first)}") from error


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a sweep, from the command line's text."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SpecError(f"--seeds {text}: write whole numbers separated by commas, as in --seeds 0,1,2") from None


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a spec. Leave it as it is: all callers get the same."""
    return _schema()


@cache
def _schema() -> dict[str, Any]:
    return _ADAPTER.json_schema()  # takes a tenth of a second


def to_toml(spec: BaseModel) -> str:
    """Return the whole spec with its defaults, as TOML that loads to an equal spec."""
    return tomli_w.dumps(spec.model_dump(mode="json", exclude_none=True))


def parse_over(texts: Sequence[str]) -> dict[str, Any]:
    """Return the values of each `key.path=value,value,...` of a sweep, or its range as text."""
    found: dict[str, Any] = {}
    for text in texts:
        key, _, values = text.partition("=")
        if not key.strip() or not values.strip():
            raise SpecError(f"--over {text}: write key.path=value,value, as in --over train.lr=1e-5,3e-5")
        try:
            listed: Any = tomllib.loads(f"v = [{values}]")["v"]  # also lists, tables and texts with commas
        except (tomllib.TOMLDecodeError, RecursionError):
            listed = [_value(part.strip(), f"--over {text}") for part in values.split(",")]
        is_range = len(listed) == 1 and isinstance(listed[0], str) and ".." in listed[0]
        found[key.strip()] = listed[0] if is_range else listed
    return found


def with_values(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """Return the spec with other values of some settings, checked again."""
    raw = spec.as_written()
    for setting, value in values.items():
        _put(raw, setting.split("."), value, f"{setting} = {_show(value)}")
    return parse_spec(raw)


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise SpecError(f"--set {override}: write key.path=value, as in --set train.lr=1e-4")
    _put(raw, parts, _value(text, f"--set {override}"), f"--set {override}")


def _value(text: str, where: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string: --set model.preset=small
    except RecursionError:
        raise SpecError(f"{where:.46}...: lists are nested too deeply") from None


def _put(raw: dict[str, Any], parts: Sequence[str], value: Any, where: str) -> None:
    table: Table = raw
    for part in parts[:-1]:
        inner: object = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SpecError(f"{where}: '{part}' is a value in this spec, not a table; set it directly")
        table = cast("Table", inner)
    table[parts[-1]] = value


def _explain(item: Any, raw: Mapping[str, Any]) -> str:
    kind, message = item["type"], plain_message(item)
    where = _written_path(item["loc"], raw, is_missing=kind == "missing")
    field = ".".join(where) or "spec"
    if kind == "extra_forbidden":
        union, chosen = _node(where[:-1], raw)
        known = sorted(chosen.get("properties", {}))
        close = difflib.get_close_matches(where[-1], known, n=1)
        if (ours := others_names.of_field(where[-1])) and not (where[-1] in ours and _owners_of(where, union)):
            return f"{field} = {_show(item['input'])}: unknown here; write {ours}"
        hint = _owners_of(where, union) or (f"did you mean '{close[0]}'?" if close else "remove it.")
        return f"{field} = {_show(item['input'])}: unknown here; {hint} Known: {', '.join(known)}"
    if kind == "missing":
        return f"{field}: is missing; add it{_usual(field, raw) or ' (see `tandem spec schema`)'}"
    if kind == "union_tag_not_found":
        choice = _node(where, raw)[0]["discriminator"]
        tags = ", ".join(repr(tag) for tag in choice["mapping"])
        needed = f"{field}.{choice['propertyName']}"
        if field.endswith("data") and not item["input"]:
            return f"{field} = {{}}: names no rows; write {_DATA}"
        for name, value in item["input"].items() if isinstance(item["input"], dict) else ():
            if ours := others_names.of_field(str(name)):
                return f"{field}.{name} = {_show(value)}: unknown here; write {ours}; and {needed}, one of {tags}"
        return f"{needed}: is missing; write one of {tags}"
    if kind == "union_tag_invalid":
        name = _node(where, raw)[0]["discriminator"]["propertyName"]
        tag, expected = item["ctx"]["tag"], str(item["ctx"]["expected_tags"])
        meant = others_names.of_value(tag, expected.replace("'", "").split(", "))
        return f"{field}.{name} = {_show(tag)}: must be {f'{meant!r}; ' if meant else ''}one of {expected}"
    if kind in _NOT_A_TABLE:
        return f"{field} = {_show(item['input'])}: must be a table, as in [{field}]"
    if kind == "value_error" and not where:
        return message
    return f"{field} = {_show(item['input'])}: {message}"


def _usual(field: str, raw: Mapping[str, Any]) -> str:
    """Return what is usually written for a field that every spec needs; empty for the others."""
    recipe, model = str(raw["recipe"]), raw.get("model")
    written: Table = cast("Table", model) if isinstance(model, dict) else {}
    way = "preset" if "preset" in written else "lora" if "lora" in written or not written else "full"
    steps = "groups_per_step = 8, group_size = 8" if recipe == "rl" else "batch_size = 8"
    lines = {
        "model": 'model = { path = "Qwen/Qwen3-0.6B", lora = { rank = 16 } }, with your model\'s directory or hub id',
        "data": _DATA,
        "train": f"train = {{ steps = 100, lr = {_USUAL_LR[recipe][way]}, {steps} }}",
        "train.lr": f"train.lr = {_USUAL_LR[recipe][way]}, which is usual here; less for large models",
        "train.steps": "train.steps = 100; `tandem plan` says how long that takes",
        "train.groups_per_step": "train.groups_per_step = 8: so many tasks a step",
        "train.group_size": "train.group_size = 8: so many answers to each task",
        "environment.name": 'environment.name = "sort" or another of `tandem env list`',
    }
    return f", as in {lines[field]}" if field in lines else ""


def plain_message(item: Any) -> str:
    """Return pydantic's message as "must be ...", without its "Input should"; our own messages are unchanged."""
    kind, message = item["type"], item["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return message
    limit = item.get("ctx", {}).get("gt")
    if kind == "greater_than" and limit == 0:
        return "must be positive"
    words = {
        "tuple_type": "must be a list",
        "int_type": "must be a whole number",
        "int_parsing": "must be a whole number",
        "float_type": "must be a number",
        "float_parsing": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be text in quotes",
    }
    message = message.replace("Input should have", "must have").replace("Input should", "must")
    return words.get(kind, f"{message[0].lower()}{message[1:]}")


def meant_recipe(written: Any) -> str:
    """Return what to write for an algorithm's name in the place of a recipe."""
    if not (meant := others_names.of_recipe(written)):
        return 'write recipe = "rl", recipe = "sft", or recipe = "preference" for pairs of answers'
    kind = "reward_model" if written == "reward" else str(written).lower()
    more = f', and [algorithm] kind = "{kind}"' if kind in _algorithms(meant) else ""
    return f'write recipe = "{meant}"{more}'


def _algorithms(recipe: str) -> Sequence[str]:
    definition = {"rl": "RlSpec", "sft": "SftSpec", "preference": "PreferenceSpec"}[recipe]
    algorithm = json_schema()["$defs"][definition]["properties"].get("algorithm", {})
    return [*algorithm.get("discriminator", {"mapping": ()})["mapping"]]


def _owners_of(where: Sequence[str], union: Table) -> str:
    """Name the other members of a union that have this key; empty if none has it."""
    choice = union.get("discriminator", {"mapping": {}})
    definitions = json_schema()["$defs"]
    owners = [tag for tag, ref in choice["mapping"].items() if where[-1] in _referred(ref, definitions)["properties"]]
    chooser = ".".join((*where[:-1], choice["propertyName"])) if owners else ""
    return f"it belongs to {chooser} = {' or '.join(map(json.dumps, owners))}." if owners else ""


def _written_path(loc: Sequence[Any], raw: Mapping[str, Any], *, is_missing: bool) -> list[str]:
    """Return pydantic's location of an error without the union tags, which the user's file does not have."""
    path: list[str] = []
    here: object = raw
    for index, part in enumerate(loc):
        inner = _inside(here, part)
        if inner is not None or (is_missing and index == len(loc) - 1):
            path.append(str(part))
            here = inner
    return path


def _inside(value: object, part: Any) -> object:
    """Return a part of a table or list; None if it is missing, which is unambiguous because TOML has no null."""
    if isinstance(value, dict):
        return cast("Table", value).get(part)
    if isinstance(value, list) and isinstance(part, int):
        items = cast("list[object]", value)
        return items[part] if part < len(items) else None
    return None


def _node(where: Sequence[str], raw: Mapping[str, Any]) -> tuple[Table, Table]:
    """Return a field's schema twice: as it stands, and resolved by the values that the user wrote."""
    schema = json_schema()
    definitions: Table = schema["$defs"]
    plain = node = _referred(schema["discriminator"]["mapping"][raw["recipe"]], definitions)
    here: object = raw
    for part in where:
        here = _inside(here, part)
        plain = node.get("properties", {}).get(part, {})
        node = _resolve(plain, here, definitions)
    return plain, node


def _resolve(node: Table, value: object, definitions: Table) -> Table:
    """Follow references; in a union take the member that the written value selects."""
    if "$ref" in node:
        return _referred(node["$ref"], definitions)
    written = cast("Table", value) if isinstance(value, dict) else {}
    choice = node.get("discriminator", {"propertyName": "", "mapping": {}})
    tag = str(written.get(choice["propertyName"]))  # the user may have written any type, even a list
    if tag in choice["mapping"]:
        return _referred(choice["mapping"][tag], definitions)
    members = [_resolve(member, written, definitions) for member in node.get("oneOf", node.get("anyOf", []))]
    members = [member for member in members if "properties" in member]

    def fit(member: Table) -> int:
        properties: Table = member["properties"]
        from_scratch = ("preset" in written) == ("preset" in properties)  # [model] is the one union without a tag
        return 100 * from_scratch + len(written.keys() & properties)

    return max(members, key=fit) if members else node


def _referred(ref: str, definitions: Table) -> Table:
    return definitions[ref.rsplit("/", 1)[-1]]


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if value is not None else "(nothing)"
    return text if len(text) <= 80 else text[:77] + "..."
