"""What a trainer's link may make this process reach for.

A link comes with a request, and whoever sends it holds the token. Still it is no command: hosts other than this one,
and directories, are what the server was started with.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.serve.app import Refused

MODES = frozenset({"shared", "broadcast", "adapter", "adapter_broadcast", "disk", "restart"})

_HOSTS = re.compile(r"(^|_)(host|hosts|address|addresses|master_addr)$")
_DIRECTORIES = re.compile(r"(^|_)(directory|path|dir|root|file)$")
_MAX_VALUES = 200_000  # names of tensors, mostly


@dataclass(frozen=True)
class Allowed:
    """`hosts`: beyond this machine's loopback. `directories`: everything under them."""

    modes: frozenset[str] = MODES
    hosts: frozenset[str] = frozenset()
    directories: tuple[Path, ...] = ()

    def check(self, link: Mapping[str, Any]) -> None:
        """Refused, with the field, if it reaches for anything else."""
        mode = link.get("mode")
        if not isinstance(mode, str) or mode not in self.modes:
            raise Refused(422, f"mode must be one of {', '.join(sorted(self.modes))}", field="link.mode")
        for number, (field, key, value) in enumerate(_strings(link, "link", "")):
            if number >= _MAX_VALUES:
                raise Refused(422, f"it holds more than {_MAX_VALUES} values", field="link")
            if _HOSTS.search(key):
                self._check_host(value, field)
            elif _DIRECTORIES.search(key):
                self._check_directory(value, field)
            elif value.startswith("/") or re.search(r"://|\\|\x00|\.\./", value):
                raise Refused(422, f"'{value:.80}' is a place, and no field for places", field=field)

    def _check_host(self, value: str, field: str) -> None:
        if value in self.hosts or value == "localhost" or _is_loopback(value):
            return
        text = (
            f"'{value:.80}' is not this machine; if it is to be reached, start the engine with --allow-host {value:.80}"
        )
        raise Refused(403, text, field=field)

    def _check_directory(self, value: str, field: str) -> None:
        path = Path(value)
        if "\x00" in value or not path.is_absolute() or ".." in path.parts:
            raise Refused(422, "must be an absolute path without '..'", field=field)
        real = path.resolve()  # where links lead
        if not any(real.is_relative_to(root.resolve()) for root in self.directories):
            text = f"'{value:.200}' is not under what this engine may read; start it with --allow-dir DIR"
            raise Refused(403, text, field=field)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback  # 127.1 and 0x7f.1 are no addresses to it
    except ValueError:
        return False


def _strings(value: Any, field: str, key: str) -> Iterator[tuple[str, str, str]]:
    """(where, key, text) of all that are in it. What stands in a list stands under the list's key."""
    if isinstance(value, str):
        yield field, key, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _strings(part, f"{field}.{name:.80}", str(name))
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part, field, key)
