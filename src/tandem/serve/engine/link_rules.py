"""Check a trainer's link before this process opens anything that it names.

The sender of a link holds the token, but a link may still not name anything at will. Each mode has a fixed set of keys.
Directories, and hosts other than this one, must be among those that the server was started with.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.serve.http.refusals import RequestRefused
from tandem.serve.openai.requests import checked
from tandem.spec.bridges import BRIDGES

_MAX_DEADLINE_S = 86400.0

Token = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Link(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    mode: str
    deadline_s: float = Field(gt=0, le=_MAX_DEADLINE_S)
    rank: int = Field(default=0, ge=0, lt=2**16)
    """The number of this engine among several."""


class MemoryLink(_Link):
    meeting: Token
    digest: bool = False


class FilesLink(_Link):
    directory: str = Field(max_length=4096)


class GroupLink(_Link):
    """The fields of bridge/collective/control_channel.py's ChannelAddress."""

    host: str = Field(max_length=253)
    port: int = Field(ge=1, lt=2**16)
    token: Token
    generation: int = Field(ge=1, lt=2**31)
    world_size: int = Field(ge=2, lt=2**16)
    device: Literal["cpu", "cuda"]
    senders: int = Field(default=1, ge=1, lt=2**16)


_FORMS: dict[str, type[_Link]] = {"memory": MemoryLink, "group": GroupLink, "files": FilesLink}
_LINKS = {name: _FORMS[traits.engine_end] for name, traits in BRIDGES.items() if traits.engine_end in _FORMS}


@dataclass(frozen=True)
class Allowed:
    """What links may name. `hosts`: in addition to loopback. `directories`: with everything under them."""

    hosts: frozenset[str] = frozenset()
    directories: tuple[Path, ...] = ()

    def check(self, link: Mapping[str, Any]) -> None:
        """Raise RequestRefused, with the field, if it is not a valid link of its mode or names anything else."""
        mode = link.get("mode")
        if not isinstance(mode, str) or mode not in _LINKS:
            raise RequestRefused(422, f"mode must be one of {', '.join(sorted(_LINKS))}", field="link.mode")
        match checked(_LINKS[mode], link, within="link"):
            case GroupLink(host=host):
                self._check_host(host, "link.host")
            case FilesLink(directory=directory):
                self._check_directory(directory, "link.directory")
            case _:
                pass

    def _check_host(self, value: str, field: str) -> None:
        if value in self.hosts or value == "localhost" or _is_loopback(value):
            return
        text = f"'{value:.80}' is another machine; to allow it, start the engine with --allow-host {value:.80}"
        raise RequestRefused(403, text, field=field)

    def _check_directory(self, value: str, field: str) -> None:
        path = Path(value)
        if "\x00" in value or not path.is_absolute() or ".." in path.parts:
            raise RequestRefused(422, "must be an absolute path without '..'", field=field)
        real = path.resolve()  # follows symbolic links
        if not any(real.is_relative_to(root.resolve()) for root in self.directories):
            text = f"'{value:.200}' is outside the directories that this engine may read; start it with --allow-dir DIR"
            raise RequestRefused(403, text, field=field)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback  # refuses forms such as 127.1 and 0x7f.1
    except ValueError:
        return False
