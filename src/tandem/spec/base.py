"""The base class of every spec model, and the mark of fields that hold a local path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, cast

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class LocalPath:
    """Mark a field that may hold a local path, relative to the directory that the command runs in."""

    kind: Literal["if there", "always", "file:Class"] = "if there"
    """if there: a path only if it exists, else a hub id or a command. always: a path, even before it exists.
    file:Class: code of the user's own (as an environment), which is looked for beside the spec's file first."""

    def absolute(self, value: str) -> str:
        """Return `value` as an absolute path; unchanged if it is a URL or no path."""
        if not value or "://" in value:
            return value
        path, class_part = value, ""
        if self.kind == "file:Class":
            path, suffix, class_part = value.rpartition(".py")
            path += suffix
            if not suffix or class_part[:1] not in ("", ":"):
                return value
        return os.path.abspath(path) + class_part if self.kind == "always" or Path(path).exists() else value


class Spec(BaseModel):
    """Frozen model that refuses unknown keys and values of another type: TOML has types, so "5" is not 5."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    def in_place(self) -> Self:
        """Return a copy with absolute paths, so that it means the same in any directory."""
        changed: dict[str, object] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            mark = next((each for each in field.metadata if isinstance(each, LocalPath)), None)
            if isinstance(value, Spec):
                changed[name] = value.in_place()
            elif mark is not None and isinstance(value, str):
                changed[name] = mark.absolute(value)
            elif mark is not None and isinstance(value, tuple | list):
                names = cast("tuple[str, ...]", value)
                changed[name] = type(names)(mark.absolute(each) for each in names)
        return self.model_copy(update=changed)
