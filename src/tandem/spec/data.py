"""`[data]` or `[warmup.data]`: recorded conversations for supervised training."""

from __future__ import annotations

import shlex
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field, field_validator

from tandem.spec.base import LocalPath, Spec


class Demonstrations(Spec):
    """The environment's demonstrations of its training tasks."""

    kind: Literal["demonstrations"] = "demonstrations"


_ROW_BY_ROW = {
    ".csv": "csv.DictReader(sys.stdin)",
    ".tsv": "csv.DictReader(sys.stdin, delimiter='\\t')",
    ".json": "json.load(sys.stdin)",
}
"""Python that reads the rows of file types that Tandem does not read, for the command in the error message."""


def _way_out(path: str) -> str:
    suffix = PurePath(path).suffix.lower()
    if suffix not in _ROW_BY_ROW:
        return "write one JSON object per line; for a data set of the hub, set kind = 'dataset' and name"
    code = f"import csv, json, sys; [print(json.dumps(row)) for row in {_ROW_BY_ROW[suffix]}]"
    rows = PurePath(path).with_suffix(".jsonl")
    return f'convert it: python3 -c "{code}" < {shlex.quote(path)} > {shlex.quote(str(rows))}'


class _Rows(Spec):
    max_examples: int = Field(default=0, ge=0)
    """Most training rows to read, from the first; 0: all."""
    max_tokens: int = Field(default=0, ge=0)
    """Most tokens in a row; longer rows are dropped and counted. 0: the model's context."""
    allow_bad_rows: bool = False
    """Skip the rows that the validation report names, instead of stopping."""


class FileData(_Rows):
    """A JSONL or parquet file. Rows have `messages`, or `prompt` and `completion`; pairs have `chosen` and
    `rejected`."""

    kind: Literal["file"] = "file"
    path: Annotated[str, LocalPath()] = Field(min_length=1)
    """Path that ends in .jsonl or .parquet, relative to the current directory."""
    eval_path: Annotated[str, LocalPath()] = ""
    """File for the held-out loss; empty: hold out `eval_share` of the rows."""
    eval_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows held out when `eval_path` is empty: at least 8 rows, or a quarter of fewer than 32; 0: none."""

    @field_validator("path", "eval_path")
    @classmethod
    def _known_suffix(cls, path: str) -> str:
        if path and not path.endswith((".jsonl", ".parquet")):
            raise ValueError(f"must end in .jsonl or .parquet; {_way_out(path)}")
        return path


class DatasetData(_Rows):
    """A data set of the `datasets` library, by name or directory (needs the `data` extra)."""

    kind: Literal["dataset"] = "dataset"
    name: Annotated[str, LocalPath()] = Field(min_length=1)
    """The name or directory for `datasets.load_dataset`."""
    subset: str = ""
    """Name of the configuration; empty: the data set's only one."""
    split: str = "train"
    """Split to train on."""
    eval_split: str = ""
    """Split for the held-out loss; empty: hold out `eval_share` of the rows."""
    eval_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows held out when `eval_split` is empty: at least 8 rows, or a quarter of fewer than 32; 0: none.
    """


DataSpec = Annotated[Demonstrations | FileData | DatasetData, Field(discriminator="kind")]
RecordedData = Annotated[FileData | DatasetData, Field(discriminator="kind")]
