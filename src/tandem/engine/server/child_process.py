"""Start, restart and end the engine process that this process owns.

If each version needs a new process, the next process is started early, because imports take most of a start and
depend on nothing. It waits until a file names what it should serve (io/prestart.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.errors import EngineError
from tandem.io import prestart as ahead
from tandem.io.child_process import Child, Ready

_log = logging.getLogger(__name__)

_CLEANING_S = 3.0  # for a waiting process, to remove its files
_DEAD_S = 3.0  # one that fails so soon was dead before it was asked for
_FILES = (("ready", ".json"), ("log", ".txt"), ("next", ".json"))


@dataclass(frozen=True)
class Owned:
    """How to start a process that ends with this one."""

    command: Callable[[str, int, Path], Sequence[str]]
    """Returns the command line, from a model directory, its version and the ready file."""
    model: str
    directory: Path
    """Holds its ready file and its log."""
    version: int = 0
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    start_deadline_s: float = 300.0
    stop_grace_s: float = 10.0
    max_restarts: int = 3
    """How often it may restart after it died or hung; starts with a new version do not count."""
    ahead: bool = False
    """Keep the next process waiting while one serves: for engines that restart with each version. For one that waits
    `command` is called with "@FILE" as the model."""


@dataclass(frozen=True)
class _One:
    """One of two processes: the one that serves, or the next one. Each has its own files."""

    child: Child
    place: int
    told: Path
    """The file that tells it what to serve, if that was unknown at its start."""


class OwnedProcess:
    """Every call blocks; any thread may call `end` at any time."""

    def __init__(self, place: Owned) -> None:
        self._place = place
        self._model, self._version = place.model, place.version
        self._lock = threading.Lock()  # held while processes are started, taken or ended; never while waiting
        self._serving: _One | None = None
        self._next: _One | None = None
        self._ended = False
        self._restarts = 0

    def begin(self, *, loads: bool) -> None:
        """Start the first process before it is asked for, which is when `start_again` waits for it. It imports what it
        needs; if it `loads`, it also loads the model."""
        self._place.directory.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._next = self._run(self._model if loads else "", self._version, None)

    def start_again(self) -> Ready:
        """Stop what is left of the old process and start a new one."""
        if self._serving is not None:
            how = self._serving.child.exit_report()
            self._serving.child.stop(grace_s=0.0)
            if self._restarts >= self._place.max_restarts:
                raise EngineError(f"engine: lost again after max_restarts = {self._place.max_restarts} restarts: {how}")
            self._restarts += 1
            _log.warning("restarting the engine (%d of %d): %s", self._restarts, self._place.max_restarts, how)
        if not Path(self._model).exists():  # old versions are deleted when newer ones come
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

    def exit_report(self) -> str:
        """Return how the serving process ended; empty while it runs."""
        serving = self._serving
        return serving.child.exit_report() if serving is not None and serving.child.exit_code is not None else ""

    def _start(self) -> Ready:
        self._place.directory.mkdir(parents=True, exist_ok=True)
        if self._next is not None:
            asked_at = time.monotonic()
            try:
                return self._wait(self._go_on())
            except EngineError as error:
                if time.monotonic() > asked_at + _DEAD_S:
                    raise  # it failed by what it was told, and so would another
                _log.warning("the engine that was started early failed; starting another: %s", error)
        with self._lock:
            one = self._serving = self._run(self._model, self._version, self._next)
        return self._wait(one)

    def _go_on(self) -> _One:
        """Return the process that was started early. It may be dead by now; waiting for it will show that."""
        with self._lock:
            following, self._next = self._next, None
            if following is None:
                raise EngineError("engine: it was closed while it was started")
            ahead.tell(following.told, {"model": self._model, "version": self._version})
            self._serving = following
        return following

    def _wait(self, one: _One) -> Ready:
        """Wait until it is ready. The next process starts meanwhile, because this one now mostly uses the GPU."""
        with self._lock:
            if self._place.ahead and self._next is None:
                self._next = self._run("", 0, one)
        return one.child.wait_ready(self._place.start_deadline_s)

    def _run(self, model: str, version: int, beside: _One | None) -> _One:
        """Start a process. `model`: empty if a file will name it later."""
        if self._ended:
            raise EngineError("engine: it was closed while it was started")
        owned, place = self._place, 1 if beside is not None and beside.place == 0 else 0
        mark = f"-{place}" if owned.ahead else ""
        ready_file, log, told = (owned.directory / f"{name}{mark}{end}" for name, end in _FILES)
        told.unlink(missing_ok=True)  # left by an earlier process
        command = owned.command(model or f"@{told}", version, ready_file)
        child = Child(command, ready_file=ready_file, log=log, environment=owned.environment)
        return _One(child, place, told)
