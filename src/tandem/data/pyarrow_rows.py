"""Parquet, through pyarrow: the only file that imports it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.errors import DataError

BATCH_ROWS = 1024
COLUMNS = ("messages", "prompt", "completion")


def read_parquet(path: Path, field_name: str) -> Iterator[dict[str, Any]]:
    """Row by row, a batch at a time; columns that no conversation needs are not read."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{field_name} = '{path}': parquet needs pyarrow; pip install 'tandem-rl[data]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{field_name} = '{path}': cannot be read as parquet: {error}") from error
