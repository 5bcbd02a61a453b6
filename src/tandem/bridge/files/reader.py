"""The engine's end of `disk`, `restart` and `adapter`: read versions from a directory, in the safetensors format.

A version is a directory that appears at once. `tandem.json` names every file and every tensor; a file that is cut,
changed or missing is refused. Tensors are read through private mappings, so they outlive the directory's deletion.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.common.manifest import EngineEndBase, Manifest, Placement, check, checksum
from tandem.bridge.common.packer import Flat
from tandem.bridge.files import parallel_io
from tandem.errors import SyncError
from tandem.io.bounded_json import bounded
from tandem.types import WeightKind, Weights

MANIFEST = "tandem.json"
_POLL_S = 0.002
_PREFIX = "v-"
_ALIGNED_BYTES = 256  # as a GPU's allocator aligns tensors, and faster than 8 for its kernels


def directory_name(version: int) -> str:
    return f"{_PREFIX}{version:06d}"


def version_in(name: str) -> int | None:
    """Return the version that a directory of this name holds; None if it is no finished version."""
    digits = name.removeprefix(_PREFIX)
    return int(digits) if name.startswith(_PREFIX) and digits.isdecimal() else None


class FilesSource(EngineEndBase):
    """The engine's end. Any number of receivers read the same files."""

    def __init__(
        self, link: Mapping[str, Any], mode: str, carries: WeightKind, device: torch.device | None = None
    ) -> None:
        """`device`: its memory receives the versions; without one, they stay in the files."""
        super().__init__(link, mode, carries)
        self._device = device or torch.device("cpu")
        self._directory = Path(self._need("directory", str)).resolve()  # links that appear in it later are not followed
        self._reuse = self._verify_where_served = False
        self._last: Flat | None = None
        self._reading = threading.Lock()

    def reuse_buffer(self) -> bool:
        self._reuse = self.carries == "adapter"  # the memory of a whole model is needed for other things
        return self._reuse

    def verify_where_served(self) -> bool:
        self._verify_where_served = self.carries == "adapter"
        return self._verify_where_served

    def receive(self, version: int, rank: int = 0) -> Weights:
        waited_for = f"version {version} was not sent"
        deadline = self.deadline()
        deadline.check(waited_for)
        deadline.until(lambda: self._appeared(version), waited_for, every_s=_POLL_S)
        path = self._directory / directory_name(version)
        try:
            if self._reuse:
                with self._reading:
                    return self._into_buffer(path, version)
            weights = _mapped(opened(path, self._mode, version), path, self._device)
        except SyncError:
            raise
        except OSError as error:
            raise SyncError(f"{self._mode}: '{path}' cannot be read: {error}") from error
        check(weights, self._mode)
        return weights

    def _into_buffer(self, path: Path, version: int) -> Weights:
        """Read into the buffer of the version before, if that had the same form."""
        manifest = opened(path, self._mode, version)
        if len(files := {entry.file for entry in manifest.tensors.values()}) != 1:
            weights = _mapped(manifest, path, self._device)  # it is empty; the engine judges that
            check(weights, self._mode)
            return weights
        (file,) = files
        size, kept = manifest.files[file][0], self._last
        if kept is None or len(kept.raw) != size or kept.places.tensors != manifest.tensors:
            kept = Flat(Placement(manifest.tensors), size, self._device)
        parallel_io.read_into(path / file, kept.raw)
        self._last = kept
        weights = _weights(manifest, path, kept.__iter__)
        if not self._verify_where_served:
            check(weights, self._mode, kept.fingerprints())
        return weights

    def _appeared(self, version: int) -> bool:
        there = self._versions()
        if there and version not in there and max(there) > version:
            raise SyncError(f"{self._mode}: asked for version {version}, sent was {max(there)}")
        return version in there

    def _versions(self) -> set[int]:
        try:
            names = [path.name for path in self._directory.iterdir()]
        except FileNotFoundError:
            raise SyncError(
                f"{self._mode}: '{self._directory}' is not there: the trainer ended, connected again, or its "
                "storage is not visible here; sync.directory must be where both ends see it"
            ) from None
        return {found for name in names if (found := version_in(name)) is not None}


def opened(directory: Path, mode: str, version: int) -> Manifest:
    """Return the manifest, after all checks of the files that need no tensors."""
    manifest = _manifest(directory, mode)
    if manifest.version != version:
        raise SyncError(f"{mode}: '{directory}' holds version {manifest.version}, not {version}")
    for name, (size, head, expected) in manifest.files.items():
        _check_file(directory, name, size, head, expected, mode)
    return manifest


def _mapped(manifest: Manifest, directory: Path, device: torch.device) -> Weights:
    held_in = sorted({entry.file for entry in manifest.tensors.values()})
    mapped = {name: _raw(directory / name, *manifest.files[name][:2], device) for name in held_in}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, entry in manifest.tensors.items():
            yield name, entry.view(mapped[entry.file])

    return _weights(manifest, directory, tensors)


def _weights(manifest: Manifest, directory: Path, tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> Weights:
    return Weights(
        manifest.version,
        manifest.kind,
        tensors,
        adapter=manifest.adapter,
        expected=manifest.digests,
        path=str(directory),
    )


def _manifest(directory: Path, mode: str) -> Manifest:
    try:
        with os.fdopen(parallel_io.opened(directory / MANIFEST), "rb") as file:
            text = bounded(file, directory / MANIFEST).decode("utf-8")
    except FileNotFoundError:
        raise SyncError(f"{mode}: '{directory}' has no {MANIFEST}: this bridge did not write it") from None
    except UnicodeDecodeError:
        raise SyncError(f"{mode}: '{directory / MANIFEST}' is damaged: it is not text") from None
    return Manifest.from_text(text, mode)


def _check_file(directory: Path, name: str, size: int, head: int, expected: str, mode: str) -> None:
    path = directory / name
    if Path(name).name != name:
        raise SyncError(f"{mode}: the manifest names '{name}', which is not a file of its own directory")
    try:
        with os.fdopen(parallel_io.opened(path), "rb") as file:
            found = os.fstat(file.fileno()).st_size
            start = file.read(head) if found == size else b""
    except FileNotFoundError:
        raise SyncError(f"{mode}: '{path}' is missing; this version will not be served") from None
    if found != size:
        raise SyncError(f"{mode}: '{path}' has {found} bytes instead of {size}: it was cut or written over")
    if checksum(start) != expected:
        raise SyncError(f"{mode}: '{path}' is damaged: its checksum does not fit")


def _raw(path: Path, size: int, head: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return parallel_io.read_into(path, aligned_behind(head, size, device))
    descriptor = parallel_io.opened(path)
    try:
        return torch.from_file(f"/dev/fd/{descriptor}", shared=False, size=size, dtype=torch.uint8)
    finally:
        os.close(descriptor)


def aligned_behind(head: int, size: int, device: torch.device) -> Tensor:
    """Return memory for a file in which what follows its header is aligned. A header ends at any multiple of 8 bytes,
    and what arrives is served where it lies."""
    begin = -head % _ALIGNED_BYTES
    return torch.empty(begin + size, dtype=torch.uint8, device=device)[begin:]
