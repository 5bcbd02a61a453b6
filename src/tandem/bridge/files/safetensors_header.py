"""Write files in the safetensors format: 8 bytes of length, a header of JSON, then the tensors without gaps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tandem.bridge.common import manifest
from tandem.bridge.common.packer import Form


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
            header, offsets = header_of(part)
            file.write(header)
            file.flush()  # tensors are written by position, past this file's buffer
            places |= {name: (file_name, len(header) + offset) for name, offset in offsets.items()}
        yield files, places
    finally:
        for file in files.values():
            file.close()


def header_of(part: Mapping[str, Form]) -> tuple[bytes, dict[str, int]]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    # Widest types first: so each tensor begins at a multiple of its width, without gaps.
    for name in sorted(part, key=lambda name: -manifest.dtype_named(part[name].dtype).itemsize):
        dtype, shape = part[name]
        start, end = end, end + manifest.TensorEntry(dtype, shape).size_bytes
        code = manifest.safetensors_code(dtype)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        offsets[name] = start
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets
