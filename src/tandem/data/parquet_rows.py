"""Read parquet files with pyarrow; only this file imports it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import DataError

BATCH_ROWS = 1024


def read_parquet(path: Path, columns: Sequence[str] | None, field_name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows with these columns only (None: all), read in batches."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{field_name} = '{path}': parquet needs pyarrow; pip install 'tandem-rl[data]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            there = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=there):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{field_name} = '{path}': cannot be read as parquet: {error}") from error
