"""What every part of a spec has in common."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class LocalPath:
    """Marks a field that may name a place on this machine, relative to where the command is run."""

    kind: Literal["if there", "always", "file:Class"] = "if there"
    """if there: what does not exist is a name of the hub's, or a command's. always: it may be made yet. file:Class: as
    an environment's name."""

    def absolute(self, value: str) -> str:
        """URLs stay, and so does whatever names no place."""
        if not value or "://" in value:
            return value
        path, behind = value, ""
        if self.kind == "file:Class":
            path, suffix, behind = value.rpartition(".py")
            path += suffix
            if not suffix or behind[:1] not in ("", ":"):
                return value
        return os.path.abspath(path) + behind if self.kind == "always" or Path(path).exists() else value


class Spec(BaseModel):
    """Frozen, and it refuses keys that it does not know and values of another type: TOML has types, so "5" is no 5."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    def in_place(self) -> Self:
        """The same from any directory: relative paths made absolute."""
        changed: dict[str, object] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            mark = next((each for each in field.metadata if isinstance(each, LocalPath)), None)
            if isinstance(value, Spec):
                changed[name] = value.in_place()
            elif mark is not None and isinstance(value, str):
                changed[name] = mark.absolute(value)
        return self.model_copy(update=changed)
