"""The manifest of a version, the check of what arrived, and the base class of the engine's ends.

This runs inside other engines' environments: it needs the standard library and torch alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tandem.bridge.common.deadline import Deadline
from tandem.errors import SyncError
from tandem.io.bounded_json import parsed
from tandem.io.safetensors_format import KNOWN
from tandem.ops import digest
from tandem.types import Fingerprints, WeightKind, Weights

FORMAT = 4
_HEAD = f'{{"format": {FORMAT}, "checksum": "'
_HEAD_CHARS = len(_HEAD) + 32 + len('", ')
_ALIGNED = 16
_T = TypeVar("_T")
_ODD = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""Errors that content raises if it has another form, or other types, than `to_text` writes."""


def dtype_named(name: Any) -> torch.dtype:
    if name not in KNOWN:
        raise SyncError(f"weights of type {name!r} cannot be carried; known are {', '.join(KNOWN)}")
    return getattr(torch, name)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def padded(size_bytes: int) -> int:
    """Return where the next tensor may begin, so that every type is aligned."""
    return -(-size_bytes // _ALIGNED) * _ALIGNED


def need(source: Mapping[str, Any], key: str, kind: type[_T], what: str) -> _T:
    value = source.get(key)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise SyncError(f"{what}: '{key}' is {value!r}, not of type {kind.__name__}; both ends must be of one release")
    return cast(_T, value)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor, in the form in which it is served."""

    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    file: str = ""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize

    def as_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": self.shape, "offset": self.offset, "file": self.file}

    def check(self, name: str, buffer_bytes: int, what: str) -> None:
        """Raise unless the tensor is inside the announced bytes and aligned to its type."""
        if any(type(number) is not int for number in (self.offset, *self.shape)):
            raise TypeError(f"'{name}' is of shape {self.shape} at {self.offset}")
        inside = self.offset >= 0 and self.offset + self.size_bytes <= buffer_bytes
        if not inside or self.offset % dtype_named(self.dtype).itemsize or min(self.shape, default=0) < 0:
            where = f"bytes {self.offset} to {self.offset + self.size_bytes} of {buffer_bytes}"
            raise SyncError(f"{what}: the manifest places '{name}' at {where}")

    def view(self, raw: Tensor) -> Tensor:
        """Return this tensor as a view of the flat bytes."""
        mine = raw[self.offset : self.offset + self.size_bytes]
        return mine.view(dtype_named(self.dtype)).view(self.shape)


class Placement:
    """Where each tensor is in the flat bytes. Most versions have the same placement, so it is sent once."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        self.tensors = tensors
        self.size_bytes = max((entry.offset + entry.size_bytes for entry in tensors.values()), default=0)
        self.text = json.dumps({name: entry.as_json() for name, entry in tensors.items()})
        self.checksum = checksum(self.text.encode())

    @classmethod
    def of(cls, forms: Mapping[str, tuple[str, tuple[int, ...]]]) -> Placement:
        """Place tensors one behind the other; `forms`: type and shape by name."""
        entries: dict[str, TensorEntry] = {}
        end = 0
        for name, (dtype, shape) in forms.items():
            entries[name] = TensorEntry(dtype, shape, padded(end))
            end = entries[name].offset + entries[name].size_bytes
        return cls(entries)

    @classmethod
    def from_text(cls, text: str, expected: str, mode: str) -> Placement:
        """Read a placement. `expected`: its checksum, from the manifest."""
        if checksum(text.encode()) != expected:
            raise SyncError(f"{mode}: the placement of tensors is damaged: its checksum does not match its content")
        try:
            places = cls(_entries(parsed(text)))
            for name, entry in places.tensors.items():
                entry.check(name, places.size_bytes, f"{mode}: tensors")
        except _ODD as error:
            raise SyncError(_odd(mode, error)) from error
        return places


@dataclass(frozen=True, slots=True)
class Manifest:
    mode: str
    version: int
    kind: WeightKind
    tensors: Mapping[str, TensorEntry]
    digests: Fingerprints
    adapter: Mapping[str, Any] = field(default_factory=dict[str, Any])
    files: Mapping[str, tuple[int, int, str]] = field(default_factory=dict[str, tuple[int, int, str]])
    """For each file: its size, the number of first bytes that the checksum covers (tensors have their own), the
    checksum."""
    size_bytes: int = 0
    """Size of the flat bytes, where tensors are not in files."""
    bucket_bytes: int = 0
    way: str = ""
    """The transport. nccl and gloo: a collective. ipc and memory: shared buffers."""
    lent: Sequence[Mapping[str, Any]] = ()
    """The handle of the shared buffers, for each receiver."""
    filled: bool = False
    """All of the version is in the shared buffers already."""
    boxes: str = ""
    """The checksum of the table of boxes (bridge/collective/boxes.py), where tensors travel as rectangles. Empty, and
    not in the text, where they travel whole."""

    def to_text(self, places: Placement | None = None) -> str:
        """Write the manifest as JSON. `places`: of these tensors; it is sent separately, and the text has its
        checksum."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        if not self.boxes:
            del content["boxes"]
        if places is None:
            content["tensors"] = {name: entry.as_json() for name, entry in self.tensors.items()}
        else:
            content |= {"tensors": places.checksum, "digests": list(self.digests.values())}
        text = json.dumps(content)[1:]
        return f'{_HEAD}{checksum(text.encode())}", {text}'

    @classmethod
    def from_text(cls, text: str, mode: str, places: Callable[[str], Placement] | None = None) -> Manifest:
        """Read a manifest. SyncError for anything but what `to_text` wrote for this mode. `places`: returns the
        placement that was sent separately, by its checksum."""
        try:
            content = parsed(text)
        except ValueError:
            raise SyncError(f"{mode}: the manifest is not JSON: it is damaged, or another program wrote it") from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise SyncError(f"{mode}: the manifest is not of format {FORMAT}; both ends must be of one release")
        if content.pop("checksum", None) != checksum(text[_HEAD_CHARS:].encode()):
            raise SyncError(f"{mode}: the manifest is damaged: its checksum does not match its content")
        try:
            return cls._from_content(content, mode, places)
        except _ODD as error:
            raise SyncError(_odd(mode, error)) from error

    @classmethod
    def _from_content(cls, content: dict[str, Any], mode: str, places: Callable[[str], Placement] | None) -> Manifest:
        apart = None if places is None else places(content["tensors"])
        if apart is None:
            content["tensors"] = _entries(content["tensors"])
        else:
            content["tensors"] = apart.tensors
            content["digests"] = dict(zip(apart.tensors, content["digests"], strict=True))
        files = {name: (size, head, checksum) for name, (size, head, checksum) in content["files"].items()}
        for name, (size, head, _) in files.items():
            if not 0 <= head <= size:
                raise ValueError(f"a head of {head} bytes of the {size} of '{name}'")
        manifest = cls(**{**content, "files": files})
        if manifest.mode != mode:
            raise SyncError(f"{mode}: the manifest is of mode '{manifest.mode}'; both ends must use one sync.bridge")
        if apart is None:
            for name, entry in manifest.tensors.items():
                size = files.get(entry.file, (0, 0, ""))[0] if entry.file else manifest.size_bytes
                entry.check(name, size, f"{mode}: version {manifest.version}")
        elif apart.size_bytes > manifest.size_bytes:  # the tensors were checked when the placement was read
            raise SyncError(f"{mode}: version {manifest.version}: {manifest.size_bytes} bytes, of {apart.size_bytes}")
        return manifest


class EngineEndBase:
    """What the engine's ends share: the link, the replies of engines, the deadline."""

    def __init__(self, link: Mapping[str, Any], mode: str, carries: WeightKind) -> None:
        """`link`: from the trainer, decoded from JSON."""
        self.link = link
        self.carries: WeightKind = carries
        self.replies: list[Mapping[str, Any]] = []
        """What engines replied when they were attached. The trainer's end reads them from the source that it
        returned."""
        self._mode = mode
        if link.get("mode") != mode:
            raise SyncError(f"{mode}: the link is of mode {link.get('mode')!r}; both ends must use one sync.bridge")
        self._deadline_s = self._need("deadline_s", float)
        self._given_up = threading.Event()

    @property
    def reply(self) -> Mapping[str, Any]:
        return self.replies[-1] if self.replies else {}

    def attached(self, reply: Mapping[str, Any]) -> None:
        self.replies.append(reply)

    def memory_for(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Return None: weights are copied, and the engine's tensors stay where they are."""
        return None

    def reuse_buffer(self) -> bool:
        """Allow each adapter to arrive in the buffer of the one before, as the same tensors. The caller must copy each
        adapter before it asks for the next one. Return whether the buffer is reused."""
        return False

    def verify_where_served(self) -> bool:
        """Leave the check of adapters to the caller, which must compare each with `expected` where it is served, before
        it answers. Return whether arriving adapters go unchecked now."""
        return False

    def prefetch(self, rank: int = 0) -> None:
        """Start to prefetch the next adapter. The caller has copied the one that it received last."""

    def close(self) -> None:
        """End every wait of this end."""
        self._given_up.set()

    def _need(self, key: str, kind: type[Any]) -> Any:
        return need(self.link, key, kind, f"{self._mode}: the link")

    def deadline(self) -> Deadline:
        return Deadline(self._mode, self._deadline_s, self._given_up)


def _odd(mode: str, error: Exception) -> str:
    return f"{mode}: the manifest does not say what this release writes: {type(error).__name__}: {error}"


def checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check(weights: Weights, mode: str, arrived: Fingerprints | None = None) -> None:
    """Raise SyncError unless every tensor that arrived is, bit for bit, the one that was sent under its name.
    `arrived`: its digests, if they were computed before."""
    arrived = digest.fingerprints(dict(weights.tensors())) if arrived is None else arrived
    if odd := sorted(arrived.keys() ^ weights.expected.keys()):
        raise SyncError(f"{mode}: version {weights.version}: {listed(odd)} only announced, or only arrived")
    if odd := sorted(name for name in arrived if arrived[name] != weights.expected[name]):
        raise SyncError(
            f"{mode}: version {weights.version}: what arrived of {listed(odd)} is not what was sent (of {len(arrived)} "
            f"tensors); digest {arrived[odd[0]]} instead of {weights.expected[odd[0]]}; it will not be served"
        )


def listed(names: list[str], most: int = 3) -> str:
    text = ", ".join(f"'{name}'" for name in names[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text


def _entries(told: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {name: TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in told.items()}
