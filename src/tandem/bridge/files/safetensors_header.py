"""Open safetensors files whose tensors are written one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tandem.bridge.common.packer import Form
from tandem.io.safetensors_format import header_of

METADATA = {"format": "pt"}


@contextmanager
def begun(
    directory: Path, shards: Mapping[str, Mapping[str, Form]]
) -> Iterator[tuple[dict[str, BinaryIO], dict[str, tuple[str, int]]]]:
    """Open the files, write their headers, and yield them with the file and offset of each tensor."""
    files: dict[str, BinaryIO] = {}
    places: dict[str, tuple[str, int]] = {}
    try:
        for file_name, part in shards.items():
            file = files[file_name] = (directory / file_name).open("wb")
            header, stored = header_of(part, METADATA)
            file.write(header)
            file.truncate(len(header) + sum(tensor.size_bytes for tensor in stored.values()))
            file.flush()  # tensors are written by position, past this file's buffer
            places |= {name: (file_name, tensor.offset) for name, tensor in stored.items()}
        yield files, places
    finally:
        for file in files.values():
            file.close()
