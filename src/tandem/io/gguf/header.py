"""Read the header of a GGUF file: its metadata, and the place of each tensor."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters by the number of a GGUF value's type."""
_STRING, _ARRAY = 8, 9
_MOST_NAMES = 1 << 20
"""Most metadata fields or tensors that a sound file has."""


class GgufTensor(NamedTuple):
    """A tensor in the file. `shape`: outermost dimension first. `offset`: of its first byte in the file."""

    kind: int
    shape: tuple[int, ...]
    offset: int


class Gguf(NamedTuple):
    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))

    def of(self, key: str, default: Any = None) -> Any:
        """Return a field of the model's architecture; KeyError if it is missing and has no default."""
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise KeyError(f"{self.architecture}.{key}")
        return value


def read_gguf(path: Path) -> Gguf:
    """Return the header. ValueError if the file is damaged, or of a version or byte order that is not supported."""
    status = path.stat()
    return _read(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, num_bytes: int, _modified: int) -> Gguf:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        try:
            return _Cursor(memory).header(path, num_bytes)
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise ValueError(f"its GGUF header is damaged: {error}") from error


class _Cursor:
    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._at = memory, 4
        if memory[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")

    def header(self, path: Path, num_bytes: int) -> Gguf:
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"its GGUF version is {version}; only little-endian files of versions 2 and 3 are read")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        if max(num_tensors, num_fields) > _MOST_NAMES:
            raise ValueError(f"its GGUF header is damaged: {num_tensors} tensors and {num_fields} fields")
        fields = {self._text(): self._value(self._number("I")) for _ in range(num_fields)}
        placed = [(self._text(), *self._placed()) for _ in range(num_tensors)]
        alignment = int(fields.get("general.alignment", 32)) or 32
        begin = -(-self._at // alignment) * alignment
        if any(begin + offset > num_bytes for *_, offset in placed):
            raise ValueError("it ends before its last tensor; download it again")
        return Gguf(
            path, fields, {name: GgufTensor(kind, shape, begin + offset) for name, kind, shape, offset in placed}
        )

    def _placed(self) -> tuple[int, tuple[int, ...], int]:
        dims = [self._number("Q") for _ in range(self._number("I"))]
        kind, offset = self._number("I"), self._number("Q")
        return kind, tuple(reversed(dims)), offset

    def _number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self._memory, self._at)
        self._at += struct.calcsize(code)
        return value

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8")

    def _bytes(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > len(self._memory):
            raise ValueError("its GGUF header is damaged: a value ends after the file")
        return self._memory[begin : self._at]

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner in (_STRING, _ARRAY):
                if count > len(self._memory):
                    raise ValueError("its GGUF header is damaged: an array is longer than the file")
                return [self._value(inner) for _ in range(count)]
            return self._scalars(inner, count)
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"its GGUF header is damaged: {kind} is no type of a value")
        code = _SCALARS[kind]
        values = self._bytes(count * struct.calcsize(code))
        return list(struct.unpack(f"<{count}{code}", values))
