"""The engine's process that is ours, whichever it is by now.

Where each version is a new start, the next process is started early: its imports take most of that time, and depend on
nothing. It waits until a file names what it is to serve (io/prestart.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.errors import EngineError
from tandem.io import prestart as ahead
from tandem.io.child_process import Child, Ready

_log = logging.getLogger(__name__)

_CLEANING_S = 3.0  # for one that waits, to take away what it has made
_FILES = (("ready", ".json"), ("log", ".txt"), ("next", ".json"))


@dataclass(frozen=True)
class Owned:
    """A process that is started here, and ends with this one."""

    command: Callable[[str, int, Path], Sequence[str]]
    """Of a model's directory, the version of what lies in it, and the ready file."""
    model: str
    directory: Path
    """For its ready file and its log."""
    version: int = 0
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    start_deadline_s: float = 300.0
    stop_grace_s: float = 10.0
    max_restarts: int = 3
    """After it died or hung; not those for a new version."""
    ahead: bool = False
    """While one serves, the next one waits: for engines that start again with each version. `command` is then also
    asked with "@FILE" for a model."""


@dataclass(frozen=True)
class _One:
    """Of two at a time, the one that serves and the next one: each has files of its own."""

    child: Child
    place: int
    told: Path
    """What it is to serve, if it is not known yet."""


class OwnedProcess:
    """Every call blocks, and any thread may call `end` meanwhile."""

    def __init__(self, place: Owned) -> None:
        self._place = place
        self._model, self._version = place.model, place.version
        self._lock = threading.Lock()  # around what is started, taken or ended; never while something is waited for
        self._serving: _One | None = None
        self._next: _One | None = None
        self._ended = False
        self._restarts = 0

    def start_again(self) -> Ready:
        """Ends what is left of the one before."""
        if self._serving is not None:
            how = self._serving.child.epitaph()
            self._serving.child.stop(grace_s=0.0)
            if self._restarts >= self._place.max_restarts:
                raise EngineError(
                    f"engine: it was started again max_restarts = {self._place.max_restarts} times, and is lost once "
                    f"more: {how}"
                )
            self._restarts += 1
            _log.warning("the engine is started again (%d of %d): %s", self._restarts, self._place.max_restarts, how)
        if not Path(self._model).exists():  # versions are deleted as newer ones come
            self._model, self._version = self._place.model, self._place.version
        return self._start()

    def start_with(self, model: str, version: int) -> Ready:
        with self._lock:
            before, self._serving = self._serving, None
        if before is not None:
            before.child.stop(self._place.stop_grace_s)
        self._model, self._version = model, version
        return self._start()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            following, self._next = self._next, None
            serving, self._serving = self._serving, None
        if following is not None:
            following.child.stop(_CLEANING_S)
        if serving is not None:
            serving.child.stop(self._place.stop_grace_s)

    def epitaph(self) -> str:
        """Empty while it runs."""
        serving = self._serving
        return serving.child.epitaph() if serving is not None and serving.child.exit_code is not None else ""

    def _start(self) -> Ready:
        self._place.directory.mkdir(parents=True, exist_ok=True)
        if self._next is not None:
            try:
                return self._wait(self._go_on())
            except EngineError as error:
                _log.warning("the engine that was started ahead is of no use, another is started: %s", error)
        with self._lock:
            one = self._serving = self._run(self._model, self._version, self._next)
        return self._wait(one)

    def _go_on(self) -> _One:
        """The one that was started ahead. It may be dead by now: who waits for it finds out."""
        with self._lock:
            following, self._next = self._next, None
            if following is None:
                raise EngineError("engine: it was closed while it was started")
            ahead.tell(following.told, {"model": self._model, "version": self._version})
            self._serving = following
        return following

    def _wait(self, one: _One) -> Ready:
        """The next one is started at once: what this one does from now on is mostly the GPU's."""
        with self._lock:
            if self._place.ahead and self._next is None:
                self._next = self._run("", 0, one)
        return one.child.wait_ready(self._place.start_deadline_s)

    def _run(self, model: str, version: int, beside: _One | None) -> _One:
        """`model`: empty if it will be told."""
        if self._ended:
            raise EngineError("engine: it was closed while it was started")
        owned, place = self._place, 1 if beside is not None and beside.place == 0 else 0
        mark = f"-{place}" if owned.ahead else ""
        ready_file, log, told = (owned.directory / f"{name}{mark}{end}" for name, end in _FILES)
        told.unlink(missing_ok=True)  # of one before
        command = owned.command(model or f"@{told}", version, ready_file)
        child = Child(command, ready_file=ready_file, log=log, environment=owned.environment)
        return _One(child, place, told)
