"""The trainer's end of the wire of files: where versions lie, how one is written, and when it is deleted.

A home is this bridge's alone:  tandem-weights-<random>/lock  common/<files of every version>  <meeting>/v-000012/...
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tandem.bridge import wire
from tandem.bridge.file_bytes import Writing
from tandem.bridge.files import MANIFEST, FilesSource, directory_name
from tandem.bridge.outgoing import Form, forms, outgoing
from tandem.errors import SyncError
from tandem.io import atomic
from tandem.ops import digest
from tandem.ops.phases import Phases
from tandem.types import Fingerprints, Sent, WeightKind, Weights

_PREFIX = "tandem-weights-"
_KEPT = 2  # the one that is served while the next is read


class FilesBridge:
    """What disk, restart and adapter share. They say what lies in a directory beside the tensors."""

    mode: str
    carries: WeightKind

    def __init__(self, directory: Path, deadline_s: float, *, private: bool) -> None:
        self._deadline_s = deadline_s
        self._home = Home(directory, private=private)
        self._source: FilesSource | None = None
        self._meetings = 0
        self._written: list[Path] = []

    def source(self, num_receivers: int = 1) -> FilesSource:
        """Every meeting has its directory: what an earlier one left is never taken for a new version."""
        if self._source is not None:
            self._source.close()
        self._meetings += 1
        directory = self._home.path / str(self._meetings)
        directory.mkdir()
        link = {"mode": self.mode, "directory": str(directory), "deadline_s": self._deadline_s}
        self._source = FilesSource(link, self.mode, self.carries)
        return self._source

    def storage(self) -> Mapping[str, Tensor] | None:
        return None

    def send(self, weights: Weights) -> Sent:
        if self._source is None:
            raise SyncError(f"{self.mode}: send() before source(): nobody was told where versions lie")
        into = self._forms(weights)
        path = Path(self._source.link["directory"]) / directory_name(weights.version)
        deadline = self._source.deadline()
        failed = f"version {weights.version} was not written to {path}"
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def write() -> tuple[wire.Manifest, Phases]:
            with torch.cuda.stream(stream):  # the thread's own would not wait for the trainer's last kernels
                return self._write(weights, into, path, lambda: deadline.check(failed))

        try:
            manifest, phases = deadline.call(write, failed)
        except SyncError:
            raise
        except OSError as error:
            raise SyncError(f"{self.mode}: {failed}: {error}; the version before stays") from error
        self._forget_old(path)
        size = sum(entry.size_bytes for entry in manifest.tensors.values())
        return Sent(weights.version, self.mode, manifest.digests, size, phases.seconds, transport=self._transport)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source = None
        self._home.close()

    # --- for those who derive

    @property
    def _replies(self) -> Sequence[Mapping[str, Any]]:
        """What engines said of themselves."""
        return self._source.replies if self._source is not None else ()

    @property
    def _transport(self) -> Mapping[str, str]:
        """Which way versions come, where there are several."""
        return {}

    def _forms(self, weights: Weights) -> Mapping[str, Form]:
        """In which each tensor is served."""
        return forms(weights, self._replies, self.mode)

    def _stem(self, name: str) -> str:
        """The file that a tensor belongs in, without the number of its shard."""
        raise NotImplementedError

    def _shards(self, into: Mapping[str, Form]) -> dict[str, dict[str, Form]]:
        """By file. One, unless a format has shards."""
        shards: dict[str, dict[str, Form]] = {}
        for name, form in into.items():
            shards.setdefault(self._stem(name), {})[name] = form
        return shards

    def _accompany(self, directory: Path, weights: Weights, shards: Mapping[str, Mapping[str, Form]]) -> None:
        """Writes what else belongs into a version."""
        raise NotImplementedError

    # --- one version

    def _write(
        self, weights: Weights, into: Mapping[str, Form], path: Path, still_wanted: Callable[[], None]
    ) -> tuple[wire.Manifest, Phases]:
        phases = Phases()
        with atomic.directory(path, durable=False) as directory:
            shards = self._shards(into)
            entries, fingerprints = self._tensors(weights, into, shards, directory, still_wanted, phases)
            self._accompany(directory, weights, shards)
            manifest = wire.Manifest(
                self.mode,
                weights.version,
                weights.kind,
                entries,
                fingerprints,
                adapter=weights.adapter,
                files={file.name: _described(file, shards) for file in sorted(directory.iterdir())},
            )
            (directory / MANIFEST).write_text(manifest.to_text(), encoding="utf-8")
            still_wanted()  # who was told that it failed must not see it appear
        phases.end("move")
        return manifest, phases

    def _tensors(
        self,
        weights: Weights,
        into: Mapping[str, Form],
        shards: Mapping[str, Mapping[str, Form]],
        directory: Path,
        still_wanted: Callable[[], None],
        phases: Phases,
    ) -> tuple[Mapping[str, wire.Entry], Fingerprints]:
        """Writes them. One by one, as each is made: there is no room for a model twice."""
        entries: dict[str, wire.Entry] = {}
        fingerprints: dict[str, str] = {}
        with _opened(directory, shards) as (files, places), closing(Writing(still_wanted)) as writing:
            for name, tensor, fingerprint in digest.fingerprinted(outgoing(weights, into, self.mode), phases):
                raw = wire.as_bytes(tensor)
                phases.end("gather")
                file, offset = places[name]
                writing.write(files[file].fileno(), raw, offset)
                entries[name], fingerprints[name] = wire.Entry(*into[name], offset, file), fingerprint
                phases.end("move")
            writing.finish()
        return entries, fingerprints

    def _forget_old(self, newest: Path) -> None:
        self._written = [path for path in self._written if path != newest] + [newest]
        for path in self._written[:-_KEPT]:
            self._forget(path)
        self._written = self._written[-_KEPT:]

    def _forget(self, version: Path) -> None:
        shutil.rmtree(version, ignore_errors=True)


class Home:
    """A directory with a lock in it, so that what a killed trainer left can be told from what another one uses."""

    def __init__(self, directory: Path, *, private: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        self.path = directory / f"{_PREFIX}{uuid.uuid4().hex}"
        self.path.mkdir(mode=0o700 if private else 0o755)
        self._lock = _locked(self.path / "lock", create=True)
        # At exit too, but not in a forked child: it is not the child's.
        self._end = weakref.finalize(self, _remove, self.path, os.getpid())

    def close(self) -> None:
        self._end()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(directory: Path) -> None:
    for left in directory.glob(f"{_PREFIX}*/lock"):
        if (lock := _locked(left, create=False)) is not None:
            shutil.rmtree(left.parent, ignore_errors=True)
            os.close(lock)


def _locked(path: Path, *, create: bool) -> int | None:
    """The descriptor, or None: another process holds it."""
    beside = path.with_suffix(".new")  # it gets its name when it is held: nobody finds it free
    try:
        descriptor = os.open(beside if create else path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    except OSError:  # another user's, or gone
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    if create:
        beside.rename(path)
    return descriptor


# --- the safetensors format: 8 bytes of length, a header of JSON, then the tensors without gaps


@contextmanager
def _opened(
    directory: Path, shards: Mapping[str, Mapping[str, Form]]
) -> Iterator[tuple[dict[str, BinaryIO], dict[str, tuple[str, int]]]]:
    """The files with their headers written, and where in which each tensor goes."""
    files: dict[str, BinaryIO] = {}
    places: dict[str, tuple[str, int]] = {}
    try:
        for file_name, part in shards.items():
            file = files[file_name] = (directory / file_name).open("wb")
            header, offsets = header_of(part)
            file.write(header)
            file.flush()  # what follows is written at its place, past this file's buffer
            places |= {name: (file_name, len(header) + offset) for name, offset in offsets.items()}
        yield files, places
    finally:
        for file in files.values():
            file.close()


def header_of(part: Mapping[str, Form]) -> tuple[bytes, dict[str, int]]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    # The widest types first: without gaps, each then begins at a multiple of its width.
    for name in sorted(part, key=lambda name: -wire.dtype_named(part[name].dtype).itemsize):
        dtype, shape = part[name]
        start, end = end, end + wire.Entry(dtype, shape).size_bytes
        code = wire.safetensors_code(dtype)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        offsets[name] = start
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _described(file: Path, tensors: Mapping[str, Any]) -> tuple[int, int, str]:
    """Size, and the checksum of what no tensor's digest covers: the header, or all of it."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(8)
        head = 8 + int.from_bytes(start, "little") if file.name in tensors else size
        return size, head, wire.checksum(start + handle.read(head - len(start)))
