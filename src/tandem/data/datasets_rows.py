"""Read data sets by name or directory with `datasets`; only this file imports it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import DataError
from tandem.spec.data import SUFFIXES


def read_dataset(name: str, subset: str, split: str, columns: Sequence[str] | None, field_name: str) -> Iterable[Any]:
    """Return the rows of a split, with these columns only (None: all). A directory may be from `save_to_disk`, or have
    data files."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DataError(f"{field_name}.name = '{name}': needs datasets; pip install 'tandem-rl[data]'") from error
    if Path(name).is_file():
        raise DataError(f"{field_name}.name = '{name}': is a file; {field_name}.path reads {', '.join(SUFFIXES)}")
    try:
        saved = _saved_to_disk(Path(name))
        data = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, subset or None, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        where = f"{field_name}.name = '{name}' (subset '{subset}', split '{split}')"
        raise DataError(f"{where}: cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise DataError(f"{field_name}.split = '{split}': '{name}' has {', '.join(map(str, data))}")
        data = data[split]
    return data if columns is None else data.select_columns([name for name in columns if name in data.column_names])


def _saved_to_disk(path: Path) -> bool:
    return any((path / file).is_file() for file in ("dataset_dict.json", "state.json"))
