"""Packages of environments that a run has installed: where they are, and which class each name means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tandem.spec.environment import MIX


@dataclass(frozen=True, slots=True)
class InstalledPackages:
    """`site`: the directory of their modules, which only sandboxed workers may import from."""

    site: Path
    places: Mapping[str, str]
    """`module:Class` by the name in the spec."""

    def loaded_as(self, name: str, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return name and parameters with `module:Class` in place of each package; also in a mix."""
        if name != MIX:
            return self.places.get(name, name), dict(params)
        parts = cast("list[dict[str, Any]]", params["parts"])
        return name, {
            **params,
            "parts": [{**part, "name": self.places.get(part["name"], part["name"])} for part in parts],
        }
