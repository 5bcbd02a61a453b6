"""A tracker in a process of its own: its imports, threads, hooks and crashes stay out of the process of the run.

In the run's process:
consumes: rows of the feed's thread         waits for: the pipe, which a slow tracker fills
In the tracker's own (`python -m` this file):
consumes: one line of JSON a row, on stdin  waits for: the run
produces: calls of the tracker, in order    waits for: the tracker
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

_ORPHAN_S = 10.0  # what a tracker still gets to deliver rows when the process of its run is gone


class Client(Protocol):
    """A tracker, through its own library."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackerTarget:
    """Where a tracker files the run."""

    directory: str
    """Of the run."""
    name: str
    """Of the run."""
    project: str
    url: str
    """Of mlflow's server; empty: where mlflow looks itself."""


class TrackerProcess:
    """The tracker `name`; what it prints is appended to trackers/<name>.log of the run.

    Everything raises ChildProcessError, with its last line, once the process has failed.
    """

    def __init__(self, name: str, place: TrackerTarget) -> None:
        self._log = Path(place.directory) / "trackers" / f"{name}.log"
        self._log.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", __name__, name, json.dumps(asdict(place)), str(os.getpid())]
        with self._log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for the run, which ends its trackers in order
            )  # fmt: skip

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([step, numbers]) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            with suppress(OSError):  # of what is still in its buffer
                self._process.stdin.close()
            self._process.wait()
            raise ChildProcessError(self._last_line()) from error

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # its exit code says more
            self._process.stdin.close()
        if self._process.wait():
            raise ChildProcessError(self._last_line())

    def kill(self) -> None:
        self._process.kill()

    def _last_line(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return f"{lines[-1] if lines else f'exit code {self._process.returncode}'} ({self._log})"


def openers(names: Sequence[str], place: TrackerTarget) -> dict[str, Callable[[], TrackerProcess]]:
    """Return by name what starts each tracker."""
    return {name: partial(TrackerProcess, name, place) for name in names}


def _open(name: str, place: TrackerTarget) -> Client:
    if name == "tensorboard":
        from tandem.obs.trackers.tensorboard import Tensorboard as Chosen
    elif name == "wandb":
        from tandem.obs.trackers.wandb import Wandb as Chosen
    elif name == "trackio":
        from tandem.obs.trackers.trackio import Trackio as Chosen
    else:
        from tandem.obs.trackers.mlflow import Mlflow as Chosen
    return Chosen(place)


def _end_after(parent: int) -> None:
    """A tracker that hangs outlives a killed run by some seconds, and no more."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(_ORPHAN_S)
    os._exit(1)


def _main(name: str, place: str, parent: str) -> None:
    threading.Thread(target=_end_after, args=(int(parent),), daemon=True).start()
    rows = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())  # a library that asks for a login reads no rows
    tracker = _open(name, TrackerTarget(**json.loads(place)))
    for line in rows:
        step, numbers = json.loads(line)
        tracker.log(step, numbers)
    tracker.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
