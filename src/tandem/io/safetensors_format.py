"""Read and write headers of the safetensors format: 8 bytes of length, a JSON header, then tensors without gaps.

Headers have the order and text of `safetensors.torch.save_file`, so that both write the same bytes.
Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from tandem.io.bounded_json import parsed

_TYPES = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1), "int16": ("I16", 2), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int32": ("I32", 4), "float32": ("F32", 4), "float64": ("F64", 8), "int64": ("I64", 8),
}  # fmt: skip
"""Code and width in bytes, by torch's name of a type. The last type is first in a file: the widest is first, so that
each tensor begins at a multiple of its width."""
_NAMES = {code: name for name, (code, _) in _TYPES.items()}
_ORDER = {name: -number for number, name in enumerate(_TYPES)}
KNOWN = _TYPES.keys()
MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


class StoredTensor(NamedTuple):
    """A tensor in a file. `offset`: of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.dtype, self.shape)


def width_of(dtype: str) -> int:
    """Return the bytes of one number. KeyError for a type that is not in KNOWN."""
    return _TYPES[dtype][1]


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * width_of(dtype)


def header_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, StoredTensor]]:
    """Return the header of a file, and the place of each tensor. `tensors`: type and shape by name."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    ends: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (_ORDER[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        start, end = end, end + size_bytes(dtype, shape)
        header[name] = {"dtype": _TYPES[dtype][0], "shape": list(shape), "data_offsets": [start, end]}
        ends[name] = start
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: StoredTensor(*tensors[name], len(head) + start) for name, start in ends.items()}


def read_header(descriptor: int, what: object) -> dict[str, StoredTensor]:
    """Return the tensors of an open file. ValueError, which names `what`, if the file is incomplete or has another
    format."""
    file_bytes = os.fstat(descriptor).st_size
    text_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < text_bytes <= min(MOST_HEADER_BYTES, file_bytes - 8):
        raise ValueError(f"{what}: is not a complete safetensors file")
    base, end = 8 + text_bytes, 0
    found: dict[str, StoredTensor] = {}
    try:
        header = cast("dict[str, dict[str, Any]]", parsed(os.pread(descriptor, text_bytes, 8)))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            code: str = entry["dtype"]
            stored = StoredTensor(_NAMES.get(code, code), tuple(entry["shape"]), base + start)
            if not 0 <= start <= stop or (code in _NAMES and stop - start != stored.size_bytes):
                raise ValueError(f"'{name}' does not fit its {stop - start} bytes")
            found[name], end = stored, max(end, stop)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{what}: its header cannot be read: {error}") from error
    if base + end != file_bytes:
        raise ValueError(f"{what}: has {file_bytes} bytes, but its header says {base + end}")
    return found
