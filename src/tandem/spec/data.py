"""`[data]` or `[warmup.data]`: recorded conversations for supervised training."""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator

from tandem.spec.base import LocalPath, Spec


class Demonstrations(Spec):
    """The environment's demonstrations of its training tasks."""

    kind: Literal["demonstrations"] = "demonstrations"


SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""The kinds of files that are read, by the end of their names."""


def is_file_name(name: str) -> bool:
    return PurePath(name).suffix.lower() in SUFFIXES


def with_kind(table: object) -> object:
    """Return a `[data]` table with its kind: `path` names a file, `name` a data set."""
    if not isinstance(table, dict) or "kind" in table:
        return cast("object", table)
    written = cast("dict[str, Any]", table)
    kind = "file" if "path" in written else "dataset" if "name" in written else ""
    return {"kind": kind, **written} if kind else written


class _Rows(Spec):
    max_examples: int = Field(default=0, ge=0)
    """Most training rows to read, from the first; 0: all."""
    max_tokens: int = Field(default=0, ge=0)
    """Most tokens in a row; longer rows are dropped and counted. 0: the model's context."""
    allow_bad_rows: bool = False
    """Skip the rows that the validation report names, instead of stopping."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which column holds what, as in `{ prompt = "question", completion = "answer" }`. A text with columns in braces is
    filled in for each row: `"Which team? {text}"`."""


class FileData(_Rows):
    """A file. Rows are chats (`messages`), `prompt` and `completion`, Alpaca or ShareGPT; pairs have `chosen` and
    `rejected`; other columns are mapped by `columns`."""

    kind: Literal["file"] = "file"
    path: Annotated[str, LocalPath()] = Field(min_length=1)
    """Path of a .jsonl, .json, .csv, .tsv, .parquet or .txt file; looked for beside the spec's file first, then in the
    current directory."""
    eval_path: Annotated[str, LocalPath()] = ""
    """File for the held-out loss; empty: hold out `eval_share` of the rows."""
    eval_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows held out when `eval_path` is empty: at least 8 rows, or a quarter of fewer than 32; 0: none."""

    @field_validator("path", "eval_path")
    @classmethod
    def _known_suffix(cls, path: str) -> str:
        if path and not is_file_name(path):
            raise ValueError(
                f"must be a file that ends in {', '.join(SUFFIXES)}; a directory or a data set of the hub is data.name"
            )
        return path


class DatasetData(_Rows):
    """A data set of the `datasets` library, by name or directory (needs the `data` extra)."""

    kind: Literal["dataset"] = "dataset"
    name: Annotated[str, LocalPath()] = Field(min_length=1)
    """The name on the hub, or a directory."""
    subset: str = ""
    """Name of the configuration; empty: the data set's only one."""
    split: str = "train"
    """Split to train on."""
    eval_split: str = ""
    """Split for the held-out loss; empty: hold out `eval_share` of the rows."""
    eval_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows held out when `eval_split` is empty: at least 8 rows, or a quarter of fewer than 32; 0: none.
    """

    @field_validator("name")
    @classmethod
    def _no_file(cls, name: str) -> str:
        if is_file_name(name):
            raise ValueError("names a file; write it as path, and leave out kind and name")
        return name


DataSpec = Annotated[Demonstrations | FileData | DatasetData, Field(discriminator="kind")]
RecordedData = Annotated[FileData | DatasetData, Field(discriminator="kind")]


def beside(path: str, directory: Path) -> str:
    """Return the absolute path if `path` is there, relative to `directory`; otherwise `path` unchanged."""
    there = os.path.abspath(directory / path)
    return there if path and "://" not in path and os.path.exists(there) else path


def data_beside(data: FileData | DatasetData, directory: Path) -> FileData | DatasetData:
    """Return a copy with the absolute paths of what lies beside the spec's file, in `directory`."""
    fields = ("path", "eval_path") if isinstance(data, FileData) else ("name",)
    return data.changed({name: beside(getattr(data, name), directory) for name in fields})
