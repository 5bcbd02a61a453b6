"""The nursery of an environment (`env/forkserver.py`), as the process that plays sees it: started, asked, ended.

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

from tandem.env.worker_messages import FROM_LOADER, Demonstrated, LoadedMessage, RefusedMessage, Tasks
from tandem.errors import EnvironmentFailed, SpecError
from tandem.io import json_frames, leash
from tandem.types import Message, Task

T = TypeVar("T")

_END_S, _KILL_S = 5.0, 5.0
_TAIL_BYTES = 2048

PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED",
    "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME",
    "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OMP_NUM_THREADS",
)  # fmt: skip
"""Of this process's environment variables: no key, token or password is among them."""


@dataclass(frozen=True, slots=True)
class Order:
    """Which environment, and what its processes may use."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    episode_timeout_s: float = 60.0
    load_timeout_s: float = 600.0
    memory_bytes: int = 8 * 2**30
    pass_env: Sequence[str] = ()
    """More environment variables by name."""


class ForkServerClient:
    """Raises SpecError or EnvironmentFailed where loading the environment would."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.control, theirs = socket.socketpair()
        owner, self._owned = os.pipe()
        program = [sys.executable, "-P", "-m", "tandem.env.forkserver"]
        passed = {*PASSED, *order.pass_env}
        try:
            self._leash = subprocess.Popen(
                [sys.executable, "-I", leash.__file__, str(owner), *program],
                stdin=theirs.fileno(), stdout=self._log, stderr=self._log, pass_fds=(owner,), start_new_session=True,
                env={key: value for key, value in os.environ.items() if key in passed or key.startswith("LC_")},
            )  # fmt: skip
        finally:
            os.close(owner)
            theirs.close()
        self._teller: socket.socket | None = None
        try:
            self.loaded = self._load()
        except BaseException:
            self.close()
            raise

    def start(self, number: int) -> socket.socket:
        """A worker; what it says comes by this socket."""
        ours, theirs = socket.socketpair()
        try:
            self.control.settimeout(_END_S)
            json_frames.send(self.control, {"op": "start", "worker": number}, [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise EnvironmentFailed(f"environment '{self._order.name}': {self._epitaph()}") from error
        finally:
            theirs.close()
        return ours

    def kill(self, number: int, why: str) -> None:
        with suppress(OSError):  # it has ended, and so have its workers
            self.control.settimeout(_END_S)
            json_frames.send(self.control, {"op": "kill", "worker": number, "why": why})

    def tasks(self, split: str) -> list[Task]:
        """Without their payloads; which one it is stands in `payload`."""
        teller = self._tell({"op": "tasks", "split": split})
        found: list[Task] = []
        more = True
        while more:
            page = self._hear(teller, Tasks, f"tasks('{split}')")
            more = page.more
            for told in page.tasks:
                where = {"split": split, "index": len(found)}
                found.append(Task(told.id, tuple(message.plain() for message in told.messages), where))
        return found

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Draws from `rng` as the environment would here."""
        teller = self._tell({"op": "demonstrate", **task.payload, "id": task.id, "state": rng.getstate()})
        shown = self._hear(teller, Demonstrated, f"demonstrate(task '{task.id}')")
        try:
            version, state, gauss = shown.state
            rng.setstate((version, tuple(state), gauss))  # pyright: ignore[reportArgumentType]
        except (ValueError, TypeError) as error:
            raise self._wrong(f"demonstrate(task '{task.id}') told no state of a generator: {error}") from error
        return [message.plain() for message in shown.messages]

    def close(self) -> None:
        """Every process of it is gone when this returns."""
        if self._teller is not None:
            self._teller.close()
        self.control.close()  # it ends its workers, and itself
        if self._owned >= 0:
            os.close(self._owned)
            self._owned = -1
        try:
            self._leash.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._leash.kill()  # it is stopped itself; the kernel takes the program along
            self._leash.wait(_KILL_S)
        self._log.close()

    def _load(self) -> LoadedMessage:
        self.control.settimeout(self._order.load_timeout_s)
        order = self._order
        json_frames.send(self.control, {
            "name": order.name, "params": dict(order.params), "path": [path or os.getcwd() for path in sys.path],
            "episode_timeout_s": order.episode_timeout_s, "memory_bytes": order.memory_bytes,
        })  # fmt: skip
        return self._hear(self.control, LoadedMessage, "loading it")

    def _tell(self, question: Mapping[str, Any]) -> socket.socket:
        if self._teller is None:
            self._teller = self.start(0)
            self._teller.settimeout(self._order.load_timeout_s)
        with suppress(OSError):  # it is gone; whoever listens will hear nothing
            json_frames.send(self._teller, question)
        return self._teller

    def _hear(self, source: socket.socket, wanted: type[T], doing: str) -> T:
        try:
            frame = json_frames.receive(source)
        except TimeoutError as error:
            raise self._wrong(f"{doing} took longer than {self._order.load_timeout_s:g} s") from error
        except (OSError, json_frames.BadFrame) as error:
            raise self._wrong(f"{doing}: {error}; {self._epitaph()}") from error
        if not frame:
            raise self._wrong(f"{doing} ended its process: {self._epitaph()}")
        try:
            told = FROM_LOADER.validate_json(frame)
        except ValidationError as error:
            raise self._wrong(f"{doing}: {error.errors()[0]['msg']}") from error
        if isinstance(told, RefusedMessage):
            raise SpecError(told.text) if told.kind == "spec" else EnvironmentFailed(told.text)
        if not isinstance(told, wanted):
            raise self._wrong(f"{doing} was answered by '{told.op}'")
        return told

    def _wrong(self, text: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"environment.name = '{self._order.name}': {text}")

    def _epitaph(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._leash.wait(1.0)
        code = self._leash.poll()
        how = (
            "its process runs on"
            if code is None
            else f"its process ended by signal {code - 128}"
            if code > 128
            else (f"its process ended with exit code {code}")
        )
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        last = self._log.read().decode("utf-8", "replace").strip().splitlines()[-8:]
        return "\n  ".join([how, *last])
