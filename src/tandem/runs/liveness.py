"""Detect a stalled run: a progress counter, its observers, and the stack of every thread at a stall.

Only the working thread advances the counter, at each stage, step and micro-batch: a heartbeat thread would hide a
deadlock. The counter is written to progress.json without a time. An observer measures on its own monotonic clock how
long the counter has not changed, without the time in which the observer itself was stopped. So changes of a system
clock have no effect.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

from tandem.io.bounded_json import read_json
from tandem.io.process_identity import identity

PROGRESS, STACKS = "progress.json", "stacks.txt"
_WRITE_EVERY_S = 0.5
_LONGEST_LOOK_S = 5.0  # between two looks; a longer gap counts as this much, because the observer was stopped


@dataclass(frozen=True, slots=True)
class Sign:
    """The state of a run as an observer sees it."""

    process: str = ""
    """Process id and start time (io/process_identity.py)."""
    ticks: int = 0
    stage: str = ""
    step: int = 0
    limit_s: float = 3000.0
    """Longest time in this stage without a tick."""


class ProgressCounter:
    """The progress counter that the working thread advances."""

    def __init__(self, directory: Path, *, setup_s: float = 3000.0, step_s: float = 1500.0) -> None:
        self.setup_s, self.step_s = setup_s, step_s
        self._path = directory / PROGRESS
        self._ticks = self._step = 0
        self._stage, self._stepping = "boot", False
        self._process = identity()
        self._written = float("-inf")

    def sign(self) -> Sign:
        limit_s = self.step_s if self._stepping else self.setup_s
        return Sign(self._process, self._ticks, self._stage, self._step, limit_s)

    def tick(self) -> None:
        """Count progress. This is cheap: the file is written at most twice a second."""
        self._ticks += 1
        if time.monotonic() - self._written >= _WRITE_EVERY_S:
            self.write()

    def stage(self, name: str) -> None:
        self._stage, self._stepping = name, False
        self._ticks += 1
        self.write()

    def step(self, number: int) -> None:
        self._step, begins = number, not self._stepping
        self._stepping = True
        self.tick()
        if begins:
            self.write()  # the limit has changed

    def write(self) -> None:
        """Write the file atomically, without fsync: after a power cut the process is gone anyway."""
        self._written = time.monotonic()
        temporary = self._path.with_name(f".{PROGRESS}.{os.getpid()}.tmp")
        with suppress(OSError):  # a checkpoint reports the full disk; observers see no tick meanwhile
            temporary.write_text(json.dumps(asdict(self.sign())) + "\n", encoding="utf-8")
            temporary.replace(self._path)


def read_sign(directory: Path) -> Sign | None:
    """Read progress.json; return None if it is missing or not valid."""
    try:
        row = cast("dict[str, Any]", read_json(directory / PROGRESS))
        return Sign(str(row["process"]), int(row["ticks"]), str(row["stage"]), int(row["step"]), float(row["limit_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Observer:
    """Measures how long a counter has not changed. `clock`: this process's monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._seen: tuple[str, int] | None = None
        self.quiet_s = 0.0
        """Observed seconds since the counter last changed."""

    def look(self, sign: Sign | None) -> bool:
        """Return whether the counter has not changed for longer than the stage's limit."""
        now = self._clock()
        self.quiet_s += min(now - self._looked, _LONGEST_LOOK_S)
        self._looked = now
        seen = (sign.process, sign.ticks) if sign is not None else None
        if seen != self._seen:
            self._seen, self.quiet_s = seen, 0.0
        return self.quiet_s > (sign or Sign()).limit_s


class Watchdog:
    """A thread inside the run that writes the stack of every thread when there is no progress, and continues to watch.

    It needs the interpreter. If the process is stopped, or native code holds the GIL, only an observer in another
    process notices. SIGUSR1 makes faulthandler write the stacks even then, unless the process is stopped.
    """

    def __init__(self, progress: ProgressCounter, stacks: Path, stalled: Callable[[Sign, float], None]) -> None:
        self._progress, self._stacks, self._stalled = progress, stacks, stalled
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tandem-watchdog", daemon=True)
        self._file: IO[str] | None = None

    def start(self) -> None:
        self._file = self._stacks.open("a", encoding="utf-8")
        if hasattr(faulthandler, "register"):  # not on Windows
            faulthandler.register(signal.SIGUSR1, self._file, all_threads=True)
        self._progress.write()  # only now: its readers may send SIGUSR1, which ends a process without a handler
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(timeout=5)
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGUSR1)
        if self._file is not None:
            self._file.close()
            if not self._stacks.stat().st_size:
                self._stacks.unlink()

    def _watch(self) -> None:
        observer, told = Observer(), False
        while not self._end.wait(min(1.0, self._progress.sign().limit_s / 8)):
            sign = self._progress.sign()
            stalls = observer.look(sign)
            if stalls and not told:
                assert self._file is not None
                self._file.write(all_stacks(f"no progress for {observer.quiet_s:.1f} s in stage {sign.stage}"))
                self._file.flush()
                self._stalled(sign, observer.quiet_s)
            told = stalls


def all_stacks(headline: str) -> str:
    """Return the stacks of all threads of this process except the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    mine = threading.get_ident()
    parts = [
        f"thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage]
        if number != mine
    ]
    return "\n".join([f"--- {headline}", *parts, ""])
