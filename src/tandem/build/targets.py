"""Read the file of targets, and open the provider that each names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeAlias, cast

from pydantic import Field, TypeAdapter, ValidationError

from tandem.errors import SpecError
from tandem.protocols import Provider
from tandem.providers.machine import LocalSettings, MachineProvider, SshTargetSettings
from tandem.providers.ray import RayProvider, RaySettings
from tandem.providers.skypilot import SkyPilotProvider, SkyPilotSettings
from tandem.providers.slurm import SlurmProvider, SlurmSettings
from tandem.spec.base import Spec
from tandem.spec.load import plain_message
from tandem.spec.toml import read_toml

AnyTarget: TypeAlias = Annotated[
    LocalSettings | SshTargetSettings | SlurmSettings | RaySettings | SkyPilotSettings, Field(discriminator="kind")
]

TARGETS_FILE = Path("~/.config/tandem/targets.toml")
"""Where `tandem targets` looks unless it is told."""


_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


class OnlineSettings(Spec):
    """A `tandem online serve` that names of the control server may stand for."""

    url: str = Field(pattern=r"^(https://[^/@]+|http://(127\.0\.0\.1|localhost|\[::1\])(:\d+)?)/?$")
    """Where it answers: https, or http on this machine, because its token is sent with each request."""
    token_file: str = Field(min_length=1)
    """The file of its token; `token-infer` is enough."""
    model: str = Field(min_length=1, max_length=100)
    """The name that it has for its model."""


class Targets(Spec):
    """The file of targets."""

    targets: dict[_Name, AnyTarget]
    """By name: lower-case letters, digits and "-"."""
    online: dict[_Name, OnlineSettings] = Field(default_factory=dict[str, OnlineSettings])
    """Online servers, by the name that `tandem deploy --online` takes."""


_FILE = TypeAdapter(Targets)


def read_targets(path: Path | None = None) -> dict[str, AnyTarget]:
    """Return the targets of a TOML file by name. Without `path`: of `TARGETS_FILE`; if there is none, this machine."""
    return _read(path).targets


def read_online(path: Path | None = None) -> dict[str, OnlineSettings]:
    """Return the online servers that the same file names."""
    return _read(path).online


def _read(path: Path | None) -> Targets:
    usual = TARGETS_FILE.expanduser()
    if path is None and not usual.exists():
        return Targets(targets={"local": LocalSettings()})
    file = path or usual
    raw = read_toml(file)
    try:
        return _FILE.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SpecError(f"{file}: {_explained(first)}") from error


def _explained(item: object) -> str:
    error = cast("dict[str, Any]", item)
    # pydantic names the chosen kind between the target and its field; the user's file has no such level
    where = [str(part) for at, part in enumerate(error["loc"]) if at != 2 or error["loc"][0] == "online"]
    field = ".".join(where)
    match error["type"]:
        case "union_tag_invalid":
            kinds = str(error["ctx"]["expected_tags"]).replace("'", '"')
            return f'{field}.kind = "{error["ctx"]["tag"]}": must be one of {kinds}'
        case "union_tag_not_found":
            return f'{field}.kind: is missing; write kind = "local", "ssh", "slurm", "ray" or "skypilot"'
        case "missing":
            return f"{field}: is missing; add it (docs/targets.md lists every field)"
        case "extra_forbidden":
            return f"{field}: unknown here; docs/targets.md lists every field"
        case _:
            return f"{field} = {json.dumps(error['input'], default=str):.80}: {plain_message(error)}"


def open_provider(settings: AnyTarget) -> Provider:
    """Return the provider of a target. It connects when it is first asked."""
    if isinstance(settings, SlurmSettings):
        return SlurmProvider(settings)
    if isinstance(settings, RaySettings):
        return RayProvider(settings)
    if isinstance(settings, SkyPilotSettings):
        return SkyPilotProvider(settings)
    return MachineProvider(settings)
