"""Give vLLM paths that stay the same between starts, so that it finds its compiled kernels again.

vLLM's cache key contains the model's path. So each version in its own directory, and each run, was compiled again: 24
s, and 14 s of kernels, for 1.7B. But the compiled code depends only on the model's configuration. So vLLM gets a link
whose name depends only on it. The link does not change its target while a process uses it; a process with other weights
gets another link. The key also contains the paths of source files, some of which are Tandem's.
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
_MOST = 64  # engines of one configuration on one machine, each with other weights


def package_path(otherwise: Path) -> Path:
    """Return a directory that contains only a link to this package. `otherwise`: the path to use if no stable path can
    be made."""
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
            self.why_not = (
                f"its config.json cannot be read: {error}" if Path(model).exists() else "it is not a directory"
            )
            return
        # With the machine's name, because locks of other machines that share the home may be invisible.
        form = hashlib.blake2b(config + platform.node().encode(), digest_size=8).hexdigest()
        try:
            stem = _home() / form
            stem.parent.mkdir(parents=True, exist_ok=True)
            self._take(stem, Path(model).resolve())
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home directory
            self.why_not = f"no link can be made: {error}"

    def close(self) -> None:
        """Release the link, so that other processes may change its target."""
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
        self.why_not = f"{_MOST} engines of its configuration are running"


def _is_ours(lock: int, link: Path, target: Path) -> bool:
    """True if the link points to `target`. An exclusive lock allows turning it; a shared one does not."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _turn(link, target)
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # another process may have changed it between the two locks
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
