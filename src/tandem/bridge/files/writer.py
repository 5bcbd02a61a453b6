"""The trainer's end of the bridges through files: where versions are, how one is written, and when it is deleted.

Each bridge has its own directory:  tandem-weights-<random>/lock  common/<files of every version>
<connection>/v-000012/...
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tandem.bridge.common import manifest as wire
from tandem.bridge.common.deadline import Deadline
from tandem.bridge.files.reader import MANIFEST, FilesSource, directory_name
from tandem.errors import SyncError
from tandem.io import atomic_write
from tandem.ops.phase_timer import Phases
from tandem.types import Fingerprints, Sent, WeightKind, Weights

_PREFIX = "tandem-weights-"
_Written: TypeAlias = tuple[wire.Manifest, Phases]
_KEPT = 2  # one is served while the next is read


class FilesBridge:
    """What disk, restart and adapter share. Each of them implements `_put`."""

    mode: str
    carries: WeightKind

    def __init__(self, directory: Path, deadline_s: float, *, private: bool) -> None:
        self._deadline_s = deadline_s
        self._home = Home(directory, private=private)
        self._source: FilesSource | None = None
        self._num_connections = 0
        self._written: list[Path] = []

    def source(self, num_receivers: int = 1) -> FilesSource:
        """Give every connection its own directory, so that no old file is taken for a new version."""
        if self._source is not None:
            self._source.close()
        self._num_connections += 1
        directory = self._home.path / str(self._num_connections)
        directory.mkdir()
        link = {"mode": self.mode, "directory": str(directory), "deadline_s": self._deadline_s}
        self._source = FilesSource(link, self.mode, self.carries)
        return self._source

    def storage(self) -> Mapping[str, Tensor] | None:
        return None

    def send(self, weights: Weights) -> Sent:
        if self._source is None:
            raise SyncError(f"{self.mode}: send() before source(): no engine was given a link")
        path = Path(self._source.link["directory"]) / directory_name(weights.version)
        deadline = self._source.deadline()
        failed = f"version {weights.version} was not written to {path}"
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def write() -> _Written:
            with torch.cuda.stream(stream):  # this thread's own stream would not wait for the trainer's last kernels
                return self._write(weights, path, lambda: deadline.check(failed))

        try:
            manifest, phases = self._in_time(deadline, write, failed)
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

    # --- for derived classes

    @property
    def _replies(self) -> Sequence[Mapping[str, Any]]:
        """Replies of engines when they were attached."""
        return self._source.replies if self._source is not None else ()

    @property
    def _transport(self) -> Mapping[str, str]:
        """How versions travel, where there are several ways: for the proof."""
        return {}

    def _put(
        self, weights: Weights, directory: Path, still_wanted: Callable[[], None], phases: Phases
    ) -> tuple[Mapping[str, wire.TensorEntry], Fingerprints]:
        """Write all files of a version but the manifest; return where each tensor is, and its digest. A long write
        calls `still_wanted`, which raises if the caller has given up."""
        raise NotImplementedError

    def _in_time(self, deadline: Deadline, write: Callable[[], _Written], failed: str) -> _Written:
        """Have a version written; SyncTimeout at the deadline, even where the file system stands still."""
        return deadline.call(write, failed)

    # --- one version

    def _write(self, weights: Weights, path: Path, still_wanted: Callable[[], None]) -> tuple[wire.Manifest, Phases]:
        phases = Phases()
        with atomic_write.directory(path, durable=False) as directory:
            entries, fingerprints = self._put(weights, directory, still_wanted, phases)
            of_tensors = {entry.file for entry in entries.values()}
            manifest = wire.Manifest(
                self.mode,
                weights.version,
                weights.kind,
                entries,
                fingerprints,
                adapter=weights.adapter,
                files={file.name: _described(file, file.name in of_tensors) for file in sorted(directory.iterdir())},
            )
            (directory / MANIFEST).write_text(manifest.to_text(), encoding="utf-8")
            still_wanted()  # a caller that got an error must not see the version appear
        phases.end("move")
        return manifest, phases

    def _forget_old(self, newest: Path) -> None:
        self._written = [path for path in self._written if path != newest] + [newest]
        for path in self._written[:-_KEPT]:
            self._forget(path)
        self._written = self._written[-_KEPT:]

    def _forget(self, version: Path) -> None:
        shutil.rmtree(version, ignore_errors=True)


class Home:
    """A directory with a lock in it. Without a holder, a killed trainer left the directory, and it is deleted."""

    def __init__(self, directory: Path, *, private: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        self.path = directory / f"{_PREFIX}{uuid.uuid4().hex}"
        self.path.mkdir(mode=0o700 if private else 0o755)
        self._lock = _locked(self.path / "lock", create=True)
        # At exit too, but not in a forked child: the directory belongs to the parent.
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
    """Return the descriptor of the locked file; None if another process holds the lock."""
    beside = path.with_suffix(".new")  # renamed once it is locked, so that no process finds it unlocked
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


def _described(file: Path, of_tensors: bool) -> tuple[int, int, str]:
    """Return the size, how many bytes the checksum covers, and the checksum: of the header, or of a file without
    tensors."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(8)
        head = 8 + int.from_bytes(start, "little") if of_tensors else size
        return size, head, wire.checksum(start + handle.read(head - len(start)))
