"""Client of an environment's fork server (`env/forkserver.py`): start it, send it requests, end it.

These calls block, each with a deadline.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from tandem.env.expected import Expected
from tandem.env.installed import InstalledPackages
from tandem.env.sandbox import outside
from tandem.env.sandbox.outside import Sandbox
from tandem.env.worker_messages import FROM_LOADER, Demonstrated, LoadedMessage, RefusedMessage, Tasks
from tandem.errors import EnvironmentFailed, SpecError
from tandem.io import json_frames, leash
from tandem.spec.environment import EnvironmentSpec, packages_in
from tandem.types import Message, Task

T = TypeVar("T")

_END_S, _KILL_S = 5.0, 5.0
_TAIL_BYTES = 2048

PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED",
    "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME",
    "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OMP_NUM_THREADS",
)  # fmt: skip
"""Environment variables passed on to the fork server. They hold no key, token or password."""


@dataclass(frozen=True, slots=True)
class Order:
    """Which environment to load, and the limits of its processes."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    episode_timeout_s: float = 60.0
    load_timeout_s: float = 600.0
    memory_bytes: int = 8 * 2**30
    pass_env: Sequence[str] = ()
    """Names of more environment variables to pass on."""
    sandbox: Sandbox | None = None
    """What its sandbox opens; None: it has none."""
    installed: InstalledPackages | None = None
    """The packages that `name` and `params` name; they play in a sandbox only."""

    @classmethod
    def of(cls, spec: EnvironmentSpec, installed: InstalledPackages | None = None) -> Order:
        """SpecError if it names packages that are not installed, or has no sandbox for them."""
        each_episode = spec.sandbox_each == "episode"
        if (names := packages_in(spec.name, spec.params)) and (installed is None or spec.sandbox != "bwrap"):
            raise SpecError(f"environment.name = '{names[0]}': is a package; it plays in the sandbox of a run only")
        read = spec.sandbox_read if installed is None else (*spec.sandbox_read, str(installed.site))
        opened = Sandbox(spec.sandbox_network, read, spec.sandbox_write, each_episode)
        return cls(
            spec.name, spec.params, spec.episode_timeout_s, memory_bytes=int(spec.worker_memory_gib * 2**30),
            pass_env=spec.pass_env, sandbox=opened if spec.sandbox == "bwrap" else None, installed=installed,
        )  # fmt: skip


def place_of(task: Task) -> dict[str, Any]:
    """Return where a worker finds the task."""
    return {"split": task.payload["split"], "index": task.payload["index"]}


class ForkServerClient:
    """Start the fork server and load the environment. SpecError or EnvironmentFailed if loading fails."""

    def __init__(self, order: Order) -> None:
        self._order = order
        program = [sys.executable, "-P", "-m", "tandem.env.forkserver"]
        if order.sandbox is not None:
            program = outside.command(order.sandbox, order.name, order.params, order.memory_bytes, program)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.control, child_end = socket.socketpair()
        owner, self._owner_pipe = os.pipe()
        passed = {*PASSED, *order.pass_env}
        try:
            self._leash = subprocess.Popen(
                [sys.executable, "-I", leash.__file__, str(owner), *program],
                stdin=child_end.fileno(), stdout=self._log, stderr=self._log, pass_fds=(owner,), start_new_session=True,
                env={key: value for key, value in os.environ.items() if key in passed or key.startswith("LC_")},
            )  # fmt: skip
        finally:
            os.close(owner)
            child_end.close()
        self._task_worker: socket.socket | None = None
        try:
            self.loaded = self._load()
        except BaseException:
            self.close()
            raise

    def start(self, number: int) -> socket.socket:
        """Fork a worker; return the socket to it."""
        our_end, child_end = socket.socketpair()
        try:
            self.control.settimeout(_END_S)
            json_frames.send(self.control, {"op": "start", "worker": number}, [child_end.fileno()])
        except OSError as error:
            our_end.close()
            raise EnvironmentFailed(f"environment '{self._order.name}': {self._exit_report()}") from error
        finally:
            child_end.close()
        return our_end

    def kill(self, number: int, why: str) -> None:
        with suppress(OSError):  # the fork server has ended, and its workers with it
            self.control.settimeout(_END_S)
            json_frames.send(self.control, {"op": "kill", "worker": number, "why": why})

    def tasks(self, split: str) -> list[Task]:
        """Return the tasks of a split. `payload` holds a task's split and index instead of its own payload, and what
        its answer is compared with."""
        worker = self._ask_worker({"op": "tasks", "split": split})
        found: list[Task] = []
        more = True
        while more:
            page = self._receive(worker, Tasks, f"tasks('{split}')")
            more = page.more
            for task in page.tasks:
                where = {"split": split, "index": len(found)}
                expected = Expected(task.expected.columns, tuple(task.expected.read))
                messages = tuple(message.plain() for message in task.messages)
                found.append(Task(task.id, messages, {**where, "expected": expected}))
        return found

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Return a demonstration; `rng` advances as if the environment had run in this process."""
        worker = self._ask_worker({"op": "demonstrate", **place_of(task), "id": task.id, "state": rng.getstate()})
        shown = self._receive(worker, Demonstrated, f"demonstrate(task '{task.id}')")
        try:
            version, state, gauss = shown.state
            rng.setstate((version, tuple(state), gauss))  # pyright: ignore[reportArgumentType]
        except (ValueError, TypeError) as error:
            raise self._wrong(f"demonstrate(task '{task.id}') returned an invalid generator state: {error}") from error
        return [message.plain() for message in shown.messages]

    def close(self) -> None:
        """End the fork server and all its processes before returning."""
        if self._task_worker is not None:
            self._task_worker.close()
        self.control.close()  # the fork server then ends its workers and itself
        if self._owner_pipe >= 0:
            os.close(self._owner_pipe)
            self._owner_pipe = -1
        try:
            self._leash.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._leash.kill()  # the leash process is stopped; when it dies, the kernel kills the fork server
            self._leash.wait(_KILL_S)
        self._log.close()

    def _load(self) -> LoadedMessage:
        self.control.settimeout(self._order.load_timeout_s)
        order = self._order
        name, params, path = order.name, dict(order.params), [path or os.getcwd() for path in sys.path]
        if order.installed is not None:  # its modules come first: another of the same name is not what was pinned
            name, params = order.installed.loaded_as(name, params)
            path.insert(0, str(order.installed.site))
        message = {
            "name": name, "params": params, "path": path,
            "episode_timeout_s": order.episode_timeout_s, "memory_bytes": order.memory_bytes, "sandbox": None,
        }  # fmt: skip
        if order.sandbox is not None:
            keep = outside.in_tmp(order.sandbox, order.name, order.params)
            size = outside.tmp_bytes(order.memory_bytes)
            message["sandbox"] = {"tmp_bytes": size, "keep": keep, "network": order.sandbox.network}
        with suppress(OSError):  # it has ended; the next receive reports that
            json_frames.send(self.control, message)
        try:
            return self._receive(self.control, LoadedMessage, "loading it")
        except EnvironmentFailed as error:
            if order.sandbox is not None and (refused := outside.refusal(self._last_output())):
                raise refused from error
            raise

    def _ask_worker(self, question: Mapping[str, Any]) -> socket.socket:
        if self._task_worker is None:
            self._task_worker = self.start(0)
            self._task_worker.settimeout(self._order.load_timeout_s)
        with suppress(OSError):  # it has ended; the next receive reports that
            json_frames.send(self._task_worker, question)
        return self._task_worker

    def _receive(self, source: socket.socket, wanted: type[T], doing: str) -> T:
        try:
            frame = json_frames.receive(source)
        except TimeoutError as error:
            raise self._wrong(f"{doing} took longer than {self._order.load_timeout_s:g} s") from error
        except (OSError, json_frames.BadFrame) as error:
            raise self._wrong(f"{doing}: {error}; {self._exit_report()}") from error
        if not frame:
            raise self._wrong(f"{doing} ended its process: {self._exit_report()}")
        try:
            message = FROM_LOADER.validate_json(frame)
        except ValidationError as error:
            raise self._wrong(f"{doing}: {error.errors()[0]['msg']}") from error
        if isinstance(message, RefusedMessage):
            if message.kind == "sandbox":
                raise outside.cannot(message.text)
            raise SpecError(message.text) if message.kind == "spec" else EnvironmentFailed(message.text)
        if not isinstance(message, wanted):
            raise self._wrong(f"{doing} was answered by '{message.op}'")
        return message

    def _wrong(self, text: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"environment.name = '{self._order.name}': {text}")

    def _exit_report(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._leash.wait(1.0)
        code = self._leash.poll()
        how = (
            "its process still runs"
            if code is None
            else f"its process ended by signal {code - 128}"
            if code > 128
            else (f"its process ended with exit code {code}")
        )
        return "\n  ".join([how, *self._last_output().strip().splitlines()[-8:]])

    def _last_output(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return self._log.read().decode("utf-8", "replace")
