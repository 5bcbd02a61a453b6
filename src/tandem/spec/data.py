"""`[data]` or `[warmup.data]`: recorded conversations for supervised training."""

from __future__ import annotations

import shlex
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field, field_validator

from tandem.spec.base import LocalPath, Spec


class Demonstrations(Spec):
    """The environment's own demonstrations, on its training tasks only."""

    kind: Literal["demonstrations"] = "demonstrations"


_ROW_BY_ROW = {
    ".csv": "csv.DictReader(sys.stdin)",
    ".tsv": "csv.DictReader(sys.stdin, delimiter='\\t')",
    ".json": "json.load(sys.stdin)",
}
"""What gives the rows of files that are not read, in Python."""


def _way_out(path: str) -> str:
    suffix = PurePath(path).suffix.lower()
    if suffix not in _ROW_BY_ROW:
        return "write a row a line as JSON; a data set of the hub is kind = 'dataset', with its name"
    code = f"import csv, json, sys; [print(json.dumps(row)) for row in {_ROW_BY_ROW[suffix]}]"
    rows = PurePath(path).with_suffix(".jsonl")
    return f'convert it: python3 -c "{code}" < {shlex.quote(path)} > {shlex.quote(str(rows))}'


class _Rows(Spec):
    max_examples: int = Field(default=0, ge=0)
    """Read only the first so many rows of what is trained on; 0 reads all."""
    max_tokens: int = Field(default=0, ge=0)
    """Rows with more tokens are dropped and counted; 0 allows what the model's context holds."""
    allow_bad_rows: bool = False
    """Go on without the rows that the validation report names, instead of stopping."""


class FileData(_Rows):
    """A JSONL or parquet file with `messages`, or `prompt` and `completion`; pairs have `chosen` and `rejected`."""

    kind: Literal["file"] = "file"
    path: Annotated[str, LocalPath()] = Field(min_length=1)
    """Ends in .jsonl or .parquet; relative to where the command is run."""
    eval_path: Annotated[str, LocalPath()] = ""
    """A file for the held-out loss; empty: `eval_share` of the rows is kept out."""
    eval_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows kept out for the held-out loss, when `eval_path` is empty: at least 8, or a quarter of fewer
    than 32 rows; 0 keeps out none."""

    @field_validator("path", "eval_path")
    @classmethod
    def _known_suffix(cls, path: str) -> str:
        if path and not path.endswith((".jsonl", ".parquet")):
            raise ValueError(f"only .jsonl and .parquet files are read; {_way_out(path)}")
        return path


class DatasetData(_Rows):
    """A data set by its `datasets` name or directory (needs the `data` extra)."""

    kind: Literal["dataset"] = "dataset"
    name: Annotated[str, LocalPath()] = Field(min_length=1)
    """What `datasets.load_dataset` takes."""
    subset: str = ""
    """The configuration's name, if the data set has several."""
    split: str = "train"
    """Split to train on."""
    eval_split: str = ""
    """Split for the held-out loss; empty: `eval_share` of the rows is kept out."""
    eval_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows kept out for the held-out loss, when `eval_split` is empty: at least 8, or a quarter of fewer
    than 32 rows; 0 keeps out none."""


DataSpec = Annotated[Demonstrations | FileData | DatasetData, Field(discriminator="kind")]
RecordedData = Annotated[FileData | DatasetData, Field(discriminator="kind")]
