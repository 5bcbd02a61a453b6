"""Run a tracker in its own process, so that its imports, threads, hooks and crashes do not affect the run's process.

In the run's process:
consumes: rows of the tracker's queue       waits for: the pipe, which a slow tracker fills
In the tracker's own (`python -m` this file):
consumes: a line of JSON per row, on stdin  waits for: the run
produces: calls of the tracker, in order    waits for: the tracker
"""

from __future__ import annotations

import inspect
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

from tandem.errors import SpecError
from tandem.io import own_code

_ORPHAN_S = 10.0  # for a tracker to deliver its rows after the run's process is gone


class Client(Protocol):
    """A tracker's own library, behind one interface."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackerTarget:
    """The project and the run that a tracker writes to."""

    directory: str
    """Of the run."""
    name: str
    """Of the run."""
    project: str
    url: str
    """URL of mlflow's server; empty: mlflow's default."""


class TrackerProcess:
    """The process of tracker `name`; its output is appended to the run's trackers/<name>.log.

    Once the process has failed, every method raises ChildProcessError with the last line of that output.
    """

    def __init__(self, name: str, place: TrackerTarget) -> None:
        self._log = Path(place.directory) / "trackers" / f"{own_code.short(name).replace(':', '.')}.log"
        self._log.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", __name__, name, json.dumps(asdict(place)), str(os.getpid())]
        with self._log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, encoding="utf-8",
                start_new_session=True,  # Ctrl-C goes to the run only, which ends its trackers in order
            )  # fmt: skip

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([step, numbers]) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            with suppress(OSError):  # from flushing its buffer
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


def openers(names: Sequence[str], place: TrackerTarget) -> dict[str, Callable[[], TrackerProcess | TrackerInProcess]]:
    """Return the function that starts each tracker, by name. An object of Python is used in this process, on its
    queue's thread."""
    return {own_code.short(name): _opener(name, place) for name in names}


class TrackerInProcess:
    """An object that Python passed in: nothing separates it from the run but its thread."""

    def __init__(self, client: Client) -> None:
        self.log, self.close = client.log, client.close

    def kill(self) -> None:
        """Leave a hanging call behind: its thread ends with the process."""


def _opener(name: str, place: TrackerTarget) -> Callable[[], TrackerProcess | TrackerInProcess]:
    if name.startswith(own_code.OBJECT):
        return partial(TrackerInProcess, own_code.load("track.to", name))
    return partial(TrackerProcess, name, place)


def check_tracker(name: str) -> None:
    """Check that a tracker of the user's own is a class that takes a target, and has `log` and `close`."""
    found, where = own_code.load("track.to", name), "track.to"
    if name.startswith(own_code.OBJECT):
        found = type(found)
    elif not inspect.isclass(found):
        raise SpecError(f"{where} = '{name}': is not a class; write a class with log(step, numbers) and close()")
    else:
        own_code.check_call(where, name, found, f"{found.__name__}(target)", "target")
    for method, call, arguments in (("log", "log(step, numbers)", ("step", "numbers")), ("close", "close()", ())):
        if not callable(getattr(found, method, None)):
            raise SpecError(f"{where} = '{name}'{own_code.place_of(found)}: has no method {call}; add it")
        own_code.check_call(where, name, getattr(found, method), f"self.{call}", "self", *arguments)


def _open(name: str, place: TrackerTarget) -> Client:
    if name.partition(":")[0].endswith(".py"):
        return own_code.load("track.to", name)(place)
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
    """End this process some seconds after its run was killed, even if the tracker hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(_ORPHAN_S)
    os._exit(1)


def _main(name: str, place: str, parent: str) -> None:
    threading.Thread(target=_end_after, args=(int(parent),), daemon=True).start()
    rows = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())  # a library that asks for a login must not read rows
    tracker = _open(name, TrackerTarget(**json.loads(place)))
    for line in rows:
        step, numbers = json.loads(line)
        tracker.log(step, numbers)
    tracker.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
