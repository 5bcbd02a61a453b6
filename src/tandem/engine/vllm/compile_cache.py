"""Names that stay the same from one vLLM to the next: by them it finds what it has compiled.

The path of the model is one: so each version that is served from a directory of its own, and each run, was compiled
again, 24 s and 14 s of kernels for 1.7B. What is compiled depends on the configuration alone. So vLLM is given a link
whose name does, too, and which is not turned to other weights while a process uses it: a process with other weights
gets another link, of the same form. The files that code was compiled from are others; some of them are Tandem's.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)
_MOST = 64  # engines of one form on one machine, each of other weights


def package_path(otherwise: Path) -> Path:
    """A directory that holds a link to this package, and nothing else. `otherwise`: where it is made if it cannot be
    under a name that stays."""
    package = Path(__file__).parents[2]
    try:
        path = _home() / f"package-{hashlib.blake2b(str(package).encode(), digest_size=8).hexdigest()}"
        path.mkdir(parents=True, exist_ok=True)
        _turn(path / "tandem", package)
    except (OSError, RuntimeError) as error:
        _log.warning("vLLM will compile its kernels again: no stable path for this package: %s", error)
        path = otherwise
        path.mkdir(exist_ok=True)
        _turn(path / "tandem", package)
    return path


class ModelLink:
    def __init__(self, model: str) -> None:
        self.path, self.why_not = model, ""
        self._unlock: Callable[[], object] | None = None
        try:
            config = (Path(model) / "config.json").read_bytes()
        except OSError as error:
            self.why_not = f"its form is not known: {error}" if Path(model).exists() else "it is no directory here"
            return
        # Locks of another machine may not be seen, where both have one home.
        form = hashlib.blake2b(config + platform.node().encode(), digest_size=8).hexdigest()
        try:
            stem = _home() / form
            stem.parent.mkdir(parents=True, exist_ok=True)
            self._take(stem, Path(model).resolve())
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home directory
            self.why_not = f"no link can be made there: {error}"

    def close(self) -> None:
        """Others may turn it to their weights."""
        if self._unlock is not None:
            self._unlock()

    def _take(self, stem: Path, target: Path) -> None:
        for number in range(_MOST):
            link = stem.with_name(f"{stem.name}-{number}")
            lock = os.open(link.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if _is_ours(lock, link, target):
                    self.path, self._unlock = str(link), weakref.finalize(self, _unlocked, lock)
                    return
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
        self.why_not = f"{_MOST} engines of its form are running"


def _is_ours(lock: int, link: Path, target: Path) -> bool:
    """True if the link points to `target`. An exclusive lock allows turning it; a shared one does not."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _turn(link, target)
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others may have come between the two
        return link.is_symlink() and link.readlink() == target
    return False


def _turn(link: Path, target: Path) -> None:
    if link.is_symlink() and link.readlink() == target:
        return
    beside = link.with_name(f".{link.name}.{os.getpid()}.{threading.get_ident()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    beside.replace(link)


def _home() -> Path:
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "tandem" / "vllm"


def _unlocked(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may hold it, too
    os.close(lock)
