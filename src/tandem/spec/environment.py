"""`[environment]`: the source of tasks and rewards."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from tandem.spec.base import LocalPath, Spec
from tandem.spec.data import beside
from tandem.spec.package_names import PackageName, is_package, package_name

PROMPTS, MIX = "prompts", "mix"
"""The environment whose parameters name files: data and reward functions; and the one made of several."""
_LABEL = re.compile(r"[^A-Za-z0-9_-]+")
_WORKERS = 8  # of a package, where nothing says how many episodes a step has
_PATHS = ("path", "eval_path", "name")


class NoJudge(Spec):
    """The environment uses no judge model."""

    kind: Literal["none"] = "none"


class EngineJudgeSpec(Spec):
    """The run's own engine, with greedy decoding: the current policy judges itself."""

    kind: Literal["engine"] = "engine"
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for a judge's answer; a slower one fails the episode."""


class HttpJudgeSpec(Spec):
    """A model on an OpenAI-compatible server. The API key stays in the run's own process."""

    kind: Literal["http"] = "http"
    url: str = Field(pattern=r"^https?://")
    """Base URL, ending in /v1."""
    model: str = Field(min_length=1)
    """Name of the model on the server."""
    key_env: str = ""
    """Environment variable with the API key; empty: no key."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for a judge's answer, retries included; a slower one fails the episode."""


class RewardModelJudgeSpec(Spec):
    """A reward model, loaded by the run's own process: `reward = "reward_model"` of `prompts` asks it for its score."""

    kind: Literal["reward_model"] = "reward_model"
    path: Annotated[str, LocalPath()] = Field(min_length=1)
    """Directory or hub id of a model with one label, such as the export of `algorithm.kind = "reward_model"`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes; auto: a GPU if there is one."""


JudgeSpec = Annotated[NoJudge | EngineJudgeSpec | HttpJudgeSpec | RewardModelJudgeSpec, Field(discriminator="kind")]


class EnvironmentSpec(Spec):
    """An environment by name, with the parameters of its class."""

    name: Annotated[str, LocalPath("file:Class")] = Field(min_length=1)
    """prompts: your own data set and reward functions (docs/your_data.md); arithmetic, sort, guess or count; your own:
    package.module:Class, or a file (path/to/env.py:Class), which is looked for beside the spec's file first; or
    another library's: gsm8k, math, reasoning_gym:ID, gymnasium:ID, verifiers:ID, openenv:URL (docs/adapters.md); or a
    package of your control server's index: ORG/NAME==VERSION (docs/packages.md), which plays in a sandbox."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the environment's class; unknown ones are refused."""
    episode_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for one episode, without its waits for the engine; a slower one drops its group."""
    max_failed_share: float = Field(default=0.2, ge=0, le=1)
    """The run ends when more than this share of the last 100 groups failed."""
    workers: int = Field(default=0, ge=0, le=1024)
    """Number of worker processes, each of which plays one episode at a time; 0: play all in the run's process. For
    `prompts` and reasoning_gym, whose workers only score, the default is one for each answer of a step, at most 16."""
    worker_memory_gib: float = Field(default=8.0, gt=0)
    """GiB of address space for each worker, on top of what loading the environment took."""
    pass_env: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Environment variables to pass to workers, besides the harmless ones (PATH, HOME, HF_HOME, ...)."""
    sandbox: Literal["off", "bwrap"] = "off"
    """bwrap: workers run in bubblewrap, without network and with only the files that they need, read-only; a machine
    that cannot do this refuses the run (docs/sandbox.md). off: workers are processes of the same user."""
    sandbox_each: Literal["episode", "worker"] = "episode"
    """episode: each has a sandbox of its own, and finds nothing of an earlier one; this costs some 12 ms.
    worker: the episodes of a worker share one, as they share its process."""
    sandbox_network: bool = False
    """Whether the sandbox has the network of this machine, its loopback too."""
    sandbox_read: Annotated[tuple[str, ...], Field(strict=False), LocalPath("always")] = ()
    """Files and directories that the sandbox may read, besides the interpreter, packages and the environment's own."""
    sandbox_write: Annotated[tuple[str, ...], Field(strict=False), LocalPath("always")] = ()
    """Files and directories that the sandbox may read and write; all workers share them."""
    pins: Annotated[str, LocalPath("always")] = ""
    """Directory of the packages that another run kept, RUN/environment: play those very wheels, and ask no index."""
    judge: JudgeSpec = NoJudge()
    """The model that `chat.judge(messages)` asks."""

    @model_validator(mode="before")
    @classmethod
    def _packages_have_a_sandbox(cls, tables: Any) -> Any:
        if not isinstance(tables, dict):
            return tables
        written = dict(cast("dict[str, Any]", tables))
        names = packages_in(written.get("name"), written.get("params"))
        if names:
            written.setdefault("workers", _WORKERS)
        if names and written.setdefault("sandbox", "bwrap") == "off":
            raise ValueError(
                f"environment.sandbox = 'off': '{names[0]}' is a package, whose code plays in a sandbox only; leave "
                "sandbox out"
            )
        if not names and written.get("pins"):
            raise ValueError(f"environment.pins = '{written['pins']}': '{written.get('name')}' is no package")
        return written

    @model_validator(mode="after")
    def _sandbox_can_be(self) -> Self:
        if self.sandbox == "off":
            for name in ("sandbox_each", "sandbox_network", "sandbox_read", "sandbox_write"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"environment.{name} = {_shown(value)}: has no effect without a sandbox; set "
                        "environment.sandbox = 'bwrap', or leave it out"
                    )
        elif not self.workers:
            raise ValueError(
                "environment.sandbox = 'bwrap': needs worker processes, and environment.workers = 0 plays in the run's "
                "own process; set environment.workers, for example to train.groups_per_step * train.group_size"
            )
        for name in ("sandbox_read", "sandbox_write"):
            if any(PurePath(path) == PurePath("/") for path in getattr(self, name)):
                raise ValueError(f"environment.{name} = ['/']: would open the whole machine; name what is needed")
        return self

    @model_validator(mode="after")
    def _has_its_reward_model(self) -> Self:
        if isinstance(self.judge, RewardModelJudgeSpec) or "reward_model" not in _reward_names(self.params):
            return self
        raise ValueError(
            "environment.params.reward = 'reward_model': needs the model; add [environment.judge] with kind = "
            "'reward_model' and path = its directory"
        )

    def in_place(self) -> Self:
        return super().in_place().beside(Path.cwd())

    def beside(self, directory: Path) -> Self:
        """Return a copy in which the files that `prompts` names have absolute paths, if they are in `directory`."""
        return self.changed({"params": _params_beside(self.name, self.params, directory)})


def _shown(value: object) -> str:
    """Return a setting as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(cast("tuple[str, ...]", value))) if isinstance(value, tuple) else repr(value)


def packages_in(name: object, params: object) -> list[str]:
    """Return the packages that an environment's table names, also as the parts of a mix."""
    if name == MIX and isinstance(params, Mapping):
        parts = cast("Mapping[str, Any]", params).get("parts")
        tables = cast("list[Any]", parts) if isinstance(parts, list | tuple) else []
        named = [cast("Mapping[str, Any]", part).get("name") for part in tables if isinstance(part, Mapping)]
        return [found for each in named for found in packages_in(each, None)]
    return [name] if isinstance(name, str) and is_package(name) else []


def with_versions(environment: Any, version_of: Callable[[PackageName], str]) -> Any:
    """Return the `[environment]` of a spec with a version for each package; `version_of` says those left out."""
    if isinstance(environment, list):
        return [with_versions(each, version_of) for each in cast("list[Any]", environment)]
    table = dict(cast("Mapping[str, Any]", environment))
    name = table["name"]
    if name == MIX:
        table["params"] = {**table["params"], "parts": with_versions(table["params"]["parts"], version_of)}
    elif is_package(name) and not (wanted := package_name(name)).version:
        table["name"] = f"{name}=={version_of(wanted)}"
    return table


def files_in(name: str, params: Mapping[str, Any]) -> list[str]:
    """Return the files of an environment that its spec names: its own, and of `prompts` data and reward functions."""
    if name == MIX:
        parts = cast("Sequence[Mapping[str, Any]]", params.get("parts", ()))
        return [file for part in parts for file in files_in(part["name"], part.get("params") or {})]
    if (own := _file_of(name)) is not None:
        return [own]
    if name != PROMPTS:
        return []
    data = params.get("data")
    table = cast("Mapping[str, Any]", data) if isinstance(data, Mapping) else {"path": data}
    named = [str(table[key]) for key in _PATHS if isinstance(table.get(key), str)]
    rewards = [_file_of(reward) for reward in sorted(_reward_names(params))]
    return [*named, *(file for file in rewards if file is not None)]


def _file_of(name: str) -> str | None:
    """Return the file of `file.py` or `file.py:name`; None of other names."""
    file = name if name.endswith(".py") else name.rpartition(":")[0]
    return file if file.endswith(".py") else None


def _reward_names(params: Mapping[str, Any]) -> set[str]:
    """Return the names of the rewards of `prompts`, or of those that are its parts."""
    written: Any = params.get("reward", ())
    rewards: list[Any] = [written] if isinstance(written, str | Mapping) else list(written)
    tables = (cast("Mapping[str, Any]", each).get("fn") if isinstance(each, Mapping) else each for each in rewards)
    parts: list[Mapping[str, Any]] = [each.get("params") or {} for each in params.get("parts", ())]
    return {str(each) for each in tables}.union(*map(_reward_names, parts))


def only_scores(name: object, params: object) -> bool:
    """Return whether an environment's episodes are one reply, sampled before a worker scores it."""
    if name == MIX and isinstance(params, Mapping):
        parts = cast("Mapping[str, Any]", params).get("parts")
        tables = cast("list[Mapping[str, Any]]", parts) if isinstance(parts, list) else []
        return all(only_scores(each.get("name"), each.get("params")) for each in tables)
    return isinstance(name, str) and (name == PROMPTS or name.startswith("reasoning_gym:"))


def mixed(tables: Sequence[Any]) -> dict[str, Any]:
    """Return the `[[environment]]` tables of a spec as one environment, `mix`, which holds them as its parts."""
    parts: list[dict[str, Any]] = []
    shared: dict[str, Any] = {}
    for number, table in enumerate(tables):
        where = f"environment[{number}]"
        if not isinstance(table, Mapping):
            raise ValueError(f"{where} = {table!r}: must be a table, as in [[environment]]")
        written = dict(cast("Mapping[str, Any]", table))
        if not isinstance(written.get("name"), str):
            raise ValueError(f"{where}.name: is missing; each [[environment]] names one")
        parts.append({key: written.pop(key) for key in ("name", "params", "weight", "label") if key in written})
        for key, value in written.items():
            if key not in EnvironmentSpec.model_fields:
                known = sorted({*EnvironmentSpec.model_fields, "weight", "label"})
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean '{close[0]}'? " if close else ""
                raise ValueError(f"{where}.{key} = {value!r}: unknown here; {hint}Known: {', '.join(known)}")
            if shared.setdefault(key, value) != value:
                raise ValueError(
                    f"{where}.{key} = {value!r}: another [[environment]] has {shared[key]!r}, and it counts for the "
                    "whole run; write it once"
                )
    part_labels(parts)
    return {**shared, "name": MIX, "params": {"parts": parts}}


def _label_of(name: str) -> str:
    return _LABEL.sub("_", PurePath(name.partition("==")[0]).stem).strip("_")  # of a package without its version


def part_labels(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the labels of a mix's parts: as written, or from their names. ValueError for wrong ones, and weights."""
    labels = [str(part.get("label") or _label_of(str(part["name"]))) for part in parts]
    for label, part in zip(labels, parts, strict=True):
        weight = part.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ValueError(f"environment: weight = {weight!r} of '{label}': must be a positive number")
        if _LABEL.search(label):
            raise ValueError(f"environment: label = '{label}': write letters, digits, _ and -")
        if labels.count(label) > 1:
            raise ValueError(f"environment: two are called '{label}'; give each a label of its own: label = \"...\"")
    return labels


def _params_beside(name: str, params: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    if name == MIX and isinstance(params.get("parts"), list):
        parts = cast("list[dict[str, Any]]", params["parts"])
        return {**params, "parts": [_part_beside(part, directory) for part in parts]}
    changed = dict(params)
    if name != PROMPTS:
        return changed
    data = params.get("data")
    if isinstance(data, str):
        changed["data"] = beside(data, directory)
    elif isinstance(data, Mapping):
        table = cast("Mapping[str, Any]", data)
        paths = {key: beside(table[key], directory) for key in _PATHS if isinstance(table.get(key), str)}
        changed["data"] = {**table, **paths}
    if "reward" in params:
        written = params["reward"]
        listed = cast("list[Any]", written) if isinstance(written, list | tuple) else [written]
        found = [_reward_beside(item, directory) for item in listed]
        changed["reward"] = found if isinstance(written, list | tuple) else found[0]
    return changed


def _part_beside(part: dict[str, Any], directory: Path) -> dict[str, Any]:
    params = _params_beside(part["name"], part.get("params", {}), directory)
    return {**part, "name": _reward_beside(part["name"], directory), "params": params}


def _reward_beside(item: Any, directory: Path) -> Any:
    if isinstance(item, Mapping):
        table = cast("Mapping[str, Any]", item)
        return {**table, "fn": _reward_beside(table["fn"], directory)} if "fn" in table else table
    if not isinstance(item, str):
        return item
    file, colon, name = (item, "", "") if item.endswith(".py") else item.rpartition(":")
    return beside(file, directory) + colon + name if file.endswith(".py") else item
