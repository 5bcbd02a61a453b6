"""The lease of a run's directory: one process at a time may write in it.

The lease is a file lock. The kernel releases it when the process ends, so resuming a killed run never waits. Each
holder has an epoch, one more than the holder before. If a holder is stopped and another process takes over, the old
holder finds a later epoch and writes no more. The files that it has open were replaced, so nothing reads them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal, cast

from tandem.errors import NoRoom, RunError, RunFenced, RunOwned
from tandem.io import atomic_write
from tandem.io.bounded_json import read_json
from tandem.io.process_identity import identity

_LOCK, _EPOCH = "lease", "epoch.json"
PACKAGES = "environment"
"""In a run's directory: the packages of its environment, and their pins."""
_LEAST_BYTES = 2**20  # for logs and rows until the first checkpoint
_DYING_S = 1.0  # a process that was just killed may hold the lock a moment longer


class DirectoryLease:
    def __init__(self, directory: Path, *, take_over: bool = False) -> None:
        """Take the lease. RunOwned if another process holds it; `take_over` takes it from a holder that cannot be
        ended."""
        self._directory = directory
        need_room(directory, "go on with")
        if take_over:
            (directory / _LOCK).unlink(missing_ok=True)
        self._lock = _locked(directory)
        try:
            self.epoch = _last_epoch(directory) + 1
        except RunError:
            self.close()
            raise
        atomic_write.write_json(directory / _EPOCH, {"epoch": self.epoch, "process": identity()})

    def check(self) -> None:
        """Call before every write that others may read. Raise RunFenced if another process holds the run now."""
        if not self.holds():
            raise RunFenced(
                f"{self._directory}: was taken over (epoch {_told(self._directory).get('epoch')}, this process has "
                f"{self.epoch}); nothing more is written here"
            )

    def holds(self) -> bool:
        return self._lock >= 0 and _told(self._directory).get("epoch") == self.epoch

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def begin(directory: Path, spec_toml: str, packages: Path | None = None) -> None:
    """Make a run's directory with its spec in it, in one step, so that the run can be resumed from the first moment.
    Only this user may enter it, because it holds prompts, answers and weights. `packages`: a directory with the
    packages of its environment, which is copied."""
    refuse_used(directory)
    need_room(directory, "begin")
    fresh = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    try:
        atomic_write.make_directory(directory.parent)
        fresh.mkdir(mode=atomic_write.PRIVATE)
    except OSError as error:
        why = f"{error.strerror}: '{error.filename}'"
        raise RunError(f"{directory}: cannot be made: {why}; name another directory (--run-dir)") from error
    try:
        if packages is not None:
            shutil.copytree(packages, fresh / PACKAGES)
            for each in (*(fresh / PACKAGES).iterdir(), fresh / PACKAGES):
                atomic_write.sync(each)
        atomic_write.write_text(fresh / "spec.toml", spec_toml)
        os.rename(fresh, directory)
        atomic_write.sync(directory.parent)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise RunError(
            f"{directory}: cannot be created ({error.strerror}); another process created it first"
        ) from error


def need_room(
    directory: Path, to: Literal["begin", "go on with"], size_bytes: int = _LEAST_BYTES, what: str = ""
) -> None:
    """Raise NoRoom if the disk has less free space, before anything is written or trained."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < size_bytes:
        raise NoRoom(
            f"{directory}: its disk has {free / 2**20:.1f} MiB free, and it takes {size_bytes / 2**20:.1f} MiB to {to} "
            f"a run{what}; free some space, or use another disk"
        )


def refuse_used(directory: Path) -> None:
    """Raise RunError if the path is a file or a directory that is not empty."""
    if directory.exists() and not directory.is_dir():
        raise RunError(f"{directory}: is a file; name a directory (--run-dir)")
    if directory.exists() and any(directory.iterdir()):
        resume = f"; `tandem resume {directory}` resumes the run in it" * (directory / "spec.toml").exists()
        raise RunError(f"{directory}: is not empty; give each run a directory of its own (--run-dir){resume}")


def _locked(directory: Path) -> int:
    until = time.monotonic() + _DYING_S
    while True:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            if time.monotonic() > until:
                holder = str(_told(directory).get("process", "")).partition(":")[0]
                raise RunOwned(
                    f"{directory}: process {holder or 'unknown'} works on this run; wait for it, or end it; if it "
                    "cannot be ended, take the run over (--take-over)"
                ) from None
            time.sleep(0.05)
            continue
        if _is_there(lock, directory / _LOCK):
            return lock
        os.close(lock)  # another process took over between the two calls


def _is_there(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _last_epoch(directory: Path) -> int:
    """Return the last epoch; 0 before the first. RunError if the file is damaged: a guess might repeat an old epoch."""
    found = _told(directory).get("epoch") if (directory / _EPOCH).exists() else 0
    if not isinstance(found, int):
        raise RunError(
            f"{directory / _EPOCH}: is damaged; if no process works on this run any more, remove it, then "
            f"`tandem resume {directory}`"
        )
    return found


def _told(directory: Path) -> dict[str, Any]:
    try:
        told = read_json(directory / _EPOCH)
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", told) if isinstance(told, dict) else {}
