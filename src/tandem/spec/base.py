"""The base class of every spec model, and the mark of fields that hold a local path."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args, get_origin

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

    def local_files(self) -> Iterator[str]:
        """Yield the absolute paths in this spec that exist here: another machine may lack them."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            marked = any(isinstance(each, LocalPath) for each in field.metadata)
            for each in cast("tuple[object, ...]", value if isinstance(value, tuple | list) else (value,)):
                if isinstance(each, Spec):
                    yield from each.local_files()
                elif marked and isinstance(each, str):
                    path = each[: each.rfind(".py") + 3] if ".py:" in each else each
                    if os.path.isabs(path) and os.path.exists(path):
                        yield path

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
        return self.changed(changed)

    def changed(self, values: Mapping[str, object]) -> Self:
        """Return a copy with those of `values` that differ; a setting that stays as it is still counts as left out."""
        differ = {name: value for name, value in values.items() if value != getattr(self, name)}
        return self.model_copy(update=differ) if differ else self

    def left_out(self, setting: str) -> bool:
        """Return whether the user left out `setting`, as in "model.attention"."""
        spec: object = self
        for part in setting.split("."):
            if not isinstance(spec, Spec) or part not in spec.model_fields_set:
                return True
            spec = getattr(spec, part)
        return False

    def asked(self, setting: str, otherwise: Any) -> Any:
        """Return the value of `setting` as the user wrote it; `otherwise` if it was left out."""
        if self.left_out(setting):
            return otherwise
        return reduce(getattr, setting.split("."), cast("Any", self))

    def settings(self) -> list[str]:
        """Return the settings that the user wrote, as in "model.attention", and their tables, as in "model"."""
        written = sorted(self.model_fields_set)
        tables = [name for name in written if isinstance(getattr(self, name), Spec)]
        return written + [f"{name}.{each}" for name in tables for each in getattr(self, name).settings()]

    def only_asked(self, settings: Collection[str]) -> Self:
        """Return a copy in which each setting that is none of `settings` counts as left out."""

        def of(table: str) -> list[str]:
            return [each.removeprefix(f"{table}.") for each in settings if each.startswith(f"{table}.")]

        inner = {name: value.only_asked(of(name)) for name, value in self if isinstance(value, Spec)}
        copy = self.model_copy(update=inner)
        copy.model_fields_set.intersection_update(settings)
        return copy

    def as_written(self) -> dict[str, Any]:
        """Return the tables without the settings that the user left out."""
        return _written(self, self.model_dump(mode="json", exclude_none=True))


def _written(spec: Spec, dumped: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in dumped.items():
        inner, annotation = getattr(spec, name), type(spec).model_fields[name].annotation
        is_tag = get_origin(annotation) is Literal and len(get_args(annotation)) == 1
        if name in spec.model_fields_set or is_tag:
            kept[name] = _written(inner, value) if isinstance(inner, Spec) else value
    return kept
