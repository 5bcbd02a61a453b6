"""Open safetensors files whose tensors are written one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tandem.bridge.common.manifest import TensorEntry
from tandem.bridge.common.packer import Form
from tandem.io.safetensors_format import header_of

METADATA = {"format": "pt"}


@contextmanager
def begun(
    directory: Path, shards: Mapping[str, Mapping[str, Form]]
) -> Iterator[tuple[dict[str, BinaryIO], dict[str, TensorEntry]]]:
    """Open the files, write their headers, and yield them with the entry of each tensor."""
    files: dict[str, BinaryIO] = {}
    entries: dict[str, TensorEntry] = {}
    try:
        for file_name, part in shards.items():
            file = files[file_name] = (directory / file_name).open("wb")
            header, stored = header_of(part, METADATA)
            file.write(header)
            file.truncate(len(header) + sum(tensor.size_bytes for tensor in stored.values()))
            file.flush()  # tensors are written by position, past this file's buffer
            entries |= {name: TensorEntry(*part[name], tensor.offset, file_name) for name, tensor in stored.items()}
        yield files, entries
    finally:
        for file in files.values():
            file.close()
