"""The whole way of a run on this machine: submitted over HTTP, started by the local provider, brought to its end by the
real agent and the real trainer; and what is killed on the way."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

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


class Control:
    """The control plane's process, and a caller of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (home / "targets.toml").write_text(
            f'[targets.here]\nkind = "local"\ndirectory = "{home}/jobs"\ntandem = "{home}/tandem"\n'
            'pass_env = ["PYTHONPATH", "OMP_NUM_THREADS"]\n'
        )
        (home / "tandem").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m tandem "$@"\n')
        (home / "tandem").chmod(0o755)
        self._keys = 0
        self.start()

    def start(self) -> None:
        with (self.home / "log").open("ab") as log:
            serve = [sys.executable, "-P", "-m", "tandem", "control", "serve", "--port", str(self.port)]
            here = ["--data-dir", str(self.home / "data"), "--targets", str(self.home / "targets.toml")]
            self.process = subprocess.Popen([*serve, *here], cwd=self.home, stdout=log, stderr=log)
        until(lambda: self._answers(), 60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        self._keys += 1
        token = (self.home / "data/token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": f"k{self._keys}"}
        told = httpx.request(method, f"http://127.0.0.1:{self.port}{path}", json=body, headers=headers, timeout=20)
        assert told.status_code < 300, told.text
        return told.json()

    def submit(self, steps: int, **more: Any) -> str:
        body = {"spec_toml": spec_of(self.home, steps, **more), "target": "here"}
        return self.ask("POST", "/api/runs", body)["id"]

    def state(self, run: str) -> str:
        return self.ask("GET", f"/api/runs/{run}")["state"]

    def directory(self, run: str) -> Path:
        return self.home / "jobs/runs" / run

    def mirror(self, run: str) -> Path:
        return self.home / "data/runs" / run

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

    def close(self) -> None:
        self.kill()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.home / "log").read_text()
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    found = Control(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """What `tandem train` alone makes of the same spec: digests of weights, optimizer and log."""
    known: dict[int, dict[str, str]] = {}

    def digests(steps: int) -> dict[str, str]:
        if steps not in known:
            home = tmp_path_factory.mktemp("alone")
            (home / "spec.toml").write_text(spec_of(home, steps))
            command = [sys.executable, "-P", "-m", "tandem", "train", "spec.toml", "--run-dir", "run"]
            subprocess.run(command, cwd=home, check=True, capture_output=True)
            known[steps] = digest_run(home / "run")
        return known[steps]

    return digests


def until(true: Callable[[], Any], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ends(control: Control, run: str, state: str = "succeeded") -> None:
    until(lambda: control.state(run) in ("succeeded", "failed", "stopped", "cancelled"), 200)
    found = control.ask("GET", f"/api/runs/{run}")
    assert found["state"] == state, (found, console(control))


def console(control: Control) -> str:
    return "\n".join(path.read_text()[-3000:] for path in control.home.glob("jobs/tandem-*/*") if path.is_file())


def attempts(control: Control) -> list[Path]:
    return sorted(control.home.glob("jobs/tandem-*"))


def assert_mirrored(control: Control, run: str) -> None:
    """Every small file of the run directory is in the mirror, byte by byte."""
    here, there = control.directory(run), control.mirror(run)
    files = [path.relative_to(here) for path in here.rglob("*") if path.is_file()]
    small = [file for file in files if not re.match(r"checkpoints/|export/|.*/\.|\.|.*-shm$", str(file))]
    assert {"metrics.jsonl", "status.json", "events.jsonl", "log.txt", "spec.toml"} <= {str(file) for file in small}
    for file in small:
        assert (there / file).read_bytes() == (here / file).read_bytes(), file
    assert not list(there.rglob("*.safetensors"))


def test_a_submitted_run_ends_as_the_command_alone_would(control: Control, alone: Any) -> None:
    run = control.submit(2)
    ends(control, run)
    assert digest_run(control.directory(run)) == alone(2)
    assert_mirrored(control, run)
    assert "trainer has begun" in console(control)
    assert json.loads((control.mirror(run) / "status.json").read_text())["state"] == "succeeded"
    assert (control.mirror(run) / "console").read_bytes() == (attempts(control)[0] / "trainer.log").read_bytes()
    until(lambda: not control.processes(), 20)
    tokens = [path for path in control.home.rglob("*") if path.is_file() and b"tda_" in path.read_bytes()]
    assert tokens == []


def test_agent_guard_and_control_are_killed_on_the_way_and_the_run_ends_the_same(control: Control, alone: Any) -> None:
    run = control.submit(60)
    until(lambda: control.steps(run) >= 3)
    trainer = control.processes("train")
    (worker,) = control.processes("--once")
    os.kill(worker, signal.SIGKILL)  # its guard starts another, which goes on with the same trainer
    until(lambda: "goes on with the same trainer" in console(control))
    assert control.processes("train") == trainer
    control.kill()
    seen = control.steps(run)
    until(lambda: control.steps(run) >= seen + 3)  # it trains on meanwhile
    control.start()
    assert control.state(run) == "running"
    guard = int((attempts(control)[0] / ".job/pid").read_text().split()[0])
    os.kill(guard, signal.SIGKILL)  # the agent goes on without it
    ends(control, run)
    assert len(attempts(control)) == 1
    assert digest_run(control.directory(run)) == alone(60)
    assert_mirrored(control, run)


def test_a_run_whose_processes_all_die_is_resumed_by_a_further_attempt(
    control: Control, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = control.submit(30)
    until(lambda: control.steps(run) >= 3)
    for pid in control.processes():
        os.kill(pid, signal.SIGKILL)
    ends(control, run)
    assert len(attempts(control)) == 2
    assert digest_run(control.directory(run)) == alone(30)
    assert_mirrored(control, run)


def test_a_supervisor_that_is_killed_is_followed_by_a_further_attempt(control: Control, alone: Any) -> None:
    run = control.submit(30)
    until(lambda: control.steps(run) >= 3)
    told = json.loads((attempts(control)[0] / "trainer.json").read_text())
    supervisor = int(told["program"].partition(":")[0])
    os.kill(supervisor, signal.SIGKILL)
    ends(control, run)
    assert len(attempts(control)) == 2
    assert digest_run(control.directory(run)) == alone(30)


def test_a_cancelled_run_is_gone_within_ten_seconds(control: Control) -> None:
    run = control.submit(100_000)
    until(lambda: control.steps(run) >= 2)
    began = time.monotonic()
    control.ask("POST", f"/api/runs/{run}/cancel", {})
    until(lambda: not control.processes(), 30)
    assert time.monotonic() - began < 10
    ends(control, run, "cancelled")


def test_a_wrong_spec_fails_with_its_reason_and_is_not_tried_again(control: Control) -> None:
    run = control.submit(2, model={"path": str(control.home / "no-such-model")})
    ends(control, run, "failed")
    assert len(attempts(control)) == 1
    assert "no-such-model" in control.ask("GET", f"/api/runs/{run}")["why"]
