"""The whole way of a run: `tandem control serve` in a process of its own, a caller of it, and a spec that is quick."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tandem import digest_run
from tandem.spec.load import parse_spec, to_toml

ENVIRONMENT = """
from tandem.types import Outcome, Task


class Ascii:
    def tasks(self, split):
        return [Task(f"{split} {number}", ({"role": "user", "content": f"{split} {number}"},)) for number in range(40)]

    async def run(self, task, chat):
        reply = await chat.reply()
        return Outcome(sum(character.isascii() for character in reply.text) / (len(reply.text) + 1))
"""


SEES = """
import hashlib, os, pathlib
pathlib.Path(__file__).with_suffix(".seen").write_text(hashlib.sha256(os.environ["CANARY"].encode()).hexdigest())
"""
"""Before the code of an environment: its trainer has the secret CANARY."""


class Hold:
    """Holds the trainers whose spec has `callbacks` back, so that it is the test which says how far they get."""

    def __init__(self, home: Path, step: int) -> None:
        """They get to the end of this step, of which no metrics are written yet, and stay there."""
        self._code, self._at, self._on = home / "hold.py", home / "hold.at", home / "hold.on"
        self._asked = home / "hold.asked"
        self._code.write_text(HOLDS)
        for each in (self._at, self._asked):
            each.unlink(missing_ok=True)
        self.callbacks = [f"{self._code}:Hold"]
        self.at(step)

    def at(self, step: int) -> None:
        written = self._on.with_suffix(".new")
        written.write_text(str(step))
        written.replace(self._on)

    def reached(self, step: int) -> bool:
        return self._at.exists() and self._at.read_text() == str(step)

    def was_asked_to_end(self) -> bool:
        """Whether SIGTERM came to a trainer that is held."""
        return self._asked.exists()

    def release(self) -> None:
        self._on.unlink()


HOLDS = """
import os, pathlib, signal, time

AT, ON, ASKED = (pathlib.Path(__file__).with_suffix(end) for end in (".at", ".on", ".asked"))


class Hold:
    def on_step(self, step):
        ends = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *told: (ASKED.touch(), ends(*told)))
        while (limit := allowed()) is not None and step.version >= limit:
            written = AT.with_suffix(f".{os.getpid()}")
            written.write_text(str(step.version))
            written.replace(AT)
            time.sleep(0.02)
        signal.signal(signal.SIGTERM, ends)


def allowed():
    try:
        return int(ON.read_text())
    except FileNotFoundError:
        return None
"""


def spec_of(home: Path, steps: int, **more: Any) -> str:
    (home / "ascii.py").write_text(ENVIRONMENT)
    tables = {
        "recipe": "rl",
        "name": "ascii",
        "device": "cpu",
        "model": {"preset": "tiny"},
        "environment": {"name": str(home / "ascii.py")},
        "train": {"steps": steps, "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "max_tokens": 6},
        "eval": {"tasks": 4},
        "checkpoint": {"every": 1, "keep_every": 1000},
    }
    return to_toml(parse_spec({**tables, **more}))


def digests_alone(home: Path, steps: int) -> dict[str, str]:
    """What `tandem train` alone makes of the same spec: digests of weights, optimizer and log."""
    (home / "spec.toml").write_text(spec_of(home, steps))
    command = [sys.executable, "-P", "-m", "tandem", "train", "spec.toml", "--run-dir", "run"]
    subprocess.run(command, cwd=home, check=True, capture_output=True)
    return digest_run(home / "run")


class Control:
    """The control plane's process, and a caller of it."""

    def __init__(self, home: Path, targets: str = "", *options: str) -> None:
        """`targets`: the file of targets; default: this machine, as `here`. `options`: further ones of the command."""
        self.home, self._options = home, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        here = f'[targets.here]\nkind = "local"\ndirectory = "{home}/jobs"\ntandem = "{home}/tandem"\n'
        (home / "targets.toml").write_text(targets or here)
        self.put_command()
        self._keys = 0
        self.start()

    def put_command(self) -> None:
        """Write the targets' command: the Tandem of this process's environment, of which a job sees nothing."""
        path = os.environ.get("PYTHONPATH", "")
        variables = f"export PYTHONPATH='{path}' OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo"
        (self.home / "tandem").write_text(f'#!/bin/sh\n{variables}\nexec {sys.executable} -P -m tandem "$@"\n')
        (self.home / "tandem").chmod(0o755)

    def start(self) -> None:
        self.process = self.spawn()
        until(lambda: self._answers(), 60)

    def spawn(self) -> subprocess.Popen[bytes]:
        with (self.home / "log").open("ab") as log:
            serve = [sys.executable, "-P", "-m", "tandem", "control", "serve", "--port", str(self.port)]
            here = ["--data-dir", str(self.home / "data"), "--targets", str(self.home / "targets.toml")]
            return subprocess.Popen([*serve, *here, *self._options], cwd=self.home, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        self._keys += 1
        headers = {"Authorization": f"Bearer {self.token}", "Idempotency-Key": f"k{self._keys}"}
        told = httpx.request(method, f"http://127.0.0.1:{self.port}{path}", json=body, headers=headers, timeout=20)
        assert told.status_code < 300, told.text
        return told.json()

    @property
    def token(self) -> str:
        """The operator's."""
        return (self.home / "data/token").read_text().strip()

    def key(self, *scopes: str, **more: Any) -> str:
        return self.ask("POST", "/api/keys", {"name": "reader", "scopes": list(scopes), **more})["key"]

    def submit(self, steps: int, target: str = "here", secrets: Sequence[str] = (), **more: Any) -> str:
        body = {"spec_toml": spec_of(self.home, steps, **more), "target": target, "secrets": list(secrets)}
        return self.ask("POST", "/api/runs", body)["id"]

    def state(self, run: str) -> str:
        return self.ask("GET", f"/api/runs/{run}")["state"]

    def directory(self, run: str) -> Path:
        return self.home / "jobs/runs" / run

    def mirror(self, run: str) -> Path:
        return self.home / "data/runs" / run

    def end_lease(self, run: str) -> None:
        """Let the time of the lease be over that the run's agent has: a minute of waiting, in one write."""
        with sqlite3.connect(self.home / "data/control.sqlite3", timeout=20) as database:
            ended = database.execute(
                "UPDATE attempts SET lease_until = claimed_at WHERE run = ? AND state = 'claimed'", [run]
            )
            assert ended.rowcount == 1
        database.close()

    def steps(self, run: str) -> int:
        try:
            return (self.directory(run) / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def processes(self, *words: str) -> list[int]:
        """The processes of this test's jobs whose command line has these words."""
        found: list[int] = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words_there = (path / "cmdline").read_bytes().decode().split("\0")
                mine = f"TANDEM_JOB={self.home}".encode() in (path / "environ").read_bytes()
            except OSError:
                continue
            if mine and all(word in words_there for word in words):
                found.append(int(path.name))
        return found

    def look_for(self, secret: bytes, runs: Sequence[str], *further: Path) -> list[object]:
        """Return where a secret is: files of this test and of `further` directories, command lines, and what the
        server tells of these runs."""
        files = [path for root in (self.home, *further) for path in root.rglob("*") if path.is_file()]
        assert {"control.sqlite3", "console.txt", "trainer.log", "log"} <= {path.name for path in files}
        paths = [f"/api/runs/{run}{what}" for run in runs for what in ("", "/events", "/attempts")]
        answers = [path for path in (*paths, "/api/secrets", "/api/usage", "/api/audit") if secret in self._bytes(path)]
        return [*answers, *(path for path in (*files, *Path("/proc").glob("[0-9]*/cmdline")) if holds(path, secret))]

    def _bytes(self, path: str) -> bytes:
        return json.dumps(self.ask("GET", path)).encode()

    def close(self) -> None:
        self.process.terminate()  # not killed: a shell of its own would go on, and start a job after the look below
        self.process.wait(30)
        while there := self.processes():  # a guard may have started an agent after the look
            for pid in there:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.home / "log").read_text()
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self.port)) == 0


def not_mirrored(control: Control, run: str) -> list[str]:
    """Return the small files of the run directory whose mirror has other bytes, and weights in the mirror."""
    here, there = control.directory(run), control.mirror(run)
    files = [path.relative_to(here) for path in here.rglob("*") if path.is_file()]
    small = {str(file) for file in files if not re.match(r"checkpoints/|export/|.*/\.|\.|.*-shm$", str(file))}
    small |= {"metrics.jsonl", "status.json", "events.jsonl", "log.txt", "spec.toml"}
    differ = [name for name in sorted(small) if _bytes_of(there / name) != ((here / name).read_bytes(),)]
    return differ + [str(path) for path in there.rglob("*.safetensors")]


def _bytes_of(path: Path) -> tuple[bytes, ...]:
    return (path.read_bytes(),) if path.exists() else ()


def holds(path: Path, secret: bytes) -> bool:
    try:
        return secret in path.read_bytes()
    except OSError:  # a process that has ended, or a socket
        return False


def until(true: Callable[[], Any], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
