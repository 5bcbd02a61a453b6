"""A run whose groups come from a rollout service: service, engine, environment and trainer are processes of their own.
Trainer and service are killed; the trainer is resumed, and no group is trained on twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_env_serve import Service, free_port, program

from letters_environment import LETTERS
from tandem.model.presets import make_model
from tandem.text.tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("forked_programs")
STEPS, GROUPS, MAX_LAG = 6, 2, 1


def wait_for(done: Callable[[], Any], seconds: float, *processes: subprocess.Popen[bytes]) -> Any:
    until = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < until, "it takes too long"
        assert all(process.poll() is None for process in processes), "a process has ended"
        time.sleep(0.05)
    return found


@contextmanager
def engine_of(model: Path, at: Path) -> Iterator[tuple[str, Path]]:
    ready = at / "engine.json"
    asked = ("--version", 0, "--port", free_port(), "--data-dir", at / "engine", "--ready-file", ready)
    with program("engine", "serve", model, *asked, "--device", "cpu", "--set", "max_context=96") as process:
        told = wait_for(lambda: ready.exists() and json.loads(ready.read_text()), 60, process)
        yield told["url"], Path(told["token_file"])


def spec_of(model: Path, engine: tuple[str, Path], service: Service) -> str:
    return f"""
recipe = "rl"
name = "far"
device = "cpu"
[model]
path = "{model}"
[environment]
name = "{model.with_name("letters.py")}"
[rollouts]
kind = "service"
url = "{service.url}"
token_file = "{service.token_file}"
lease_s = 5.0
[engine]
kind = "server"
max_context = 96
url = "{engine[0]}"
token_file = "{engine[1]}"
[sync]
bridge = "broadcast"
[eval]
tasks = 4
[train]
steps = {STEPS}
lr = 1e-4
groups_per_step = {GROUPS}
group_size = 4
max_tokens = 6
max_lag = {MAX_LAG}
[checkpoint]
every = 1
keep_every = 1
"""


@contextmanager
def trainer_of(run_dir: Path, *command: object) -> Iterator[subprocess.Popen[bytes]]:
    log = run_dir.with_suffix(".txt")
    with log.open("ab") as told:
        running = subprocess.Popen(
            [sys.executable, "-m", "tandem", *map(str, command)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=told, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield running
    finally:
        running.kill()
        running.wait(timeout=10)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def trained_on(run_dir: Path) -> list[list[int]]:
    """By step, numbers of groups: those that its checkpoint has and none before it had."""
    seen: set[int] = set()
    found: list[list[int]] = []
    for version in range(1, STEPS + 1):
        state = json.loads((run_dir / "checkpoints" / f"step-{version}" / "state.json").read_text())
        new = set(state["parts"]["store"]["contained"]) - seen
        found.append(sorted(new))
        seen |= new
    return found


def test_a_run_trains_on_what_the_service_hands_out_whoever_is_killed(tmp_path: Path) -> None:
    tokenizer, model, service = byte_tokenizer(), tmp_path / "model", Service(tmp_path / "rollouts")
    make_model("tiny", tokenizer, seed=0).save_pretrained(model)
    tokenizer.save_pretrained(model)

    (tmp_path / "letters.py").write_text(LETTERS)

    def status() -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {service.token_file.read_text()}"}
        return httpx.get(f"{service.url}/v2/status", headers=headers, trust_env=False).json()

    with engine_of(model, tmp_path) as engine, service.running() as first:
        spec = tmp_path / "spec.toml"
        spec.write_text(spec_of(model, engine, service))
        asked = (
            "--rollouts", service.url, "--token-file", service.token_file, "--engine", engine[0],
            "--engine-token-file", engine[1], "--model", model, "--group-size", 4, "--max-tokens", 6,
            "--groups", 4,
        )  # fmt: skip
        with program("env", "serve", tmp_path / "letters.py", *asked) as environment:
            run = tmp_path / "run"
            with trainer_of(run, "train", spec, "--run-dir", run) as trainer:
                wait_for(lambda: (run / "checkpoints" / "step-2").exists(), 90, trainer, environment)
                trainer.send_signal(signal.SIGKILL)
            with trainer_of(run, "resume", run) as trainer:
                wait_for(lambda: (run / "checkpoints" / "step-4").exists(), 90, trainer, environment)
                first.send_signal(signal.SIGKILL)
                first.wait()
                with service.running():
                    assert trainer.wait(timeout=90) == 0, (tmp_path / "run.txt").read_text()
                    told = status()["queue"]
    trained = rows(run)
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 5, 6]
    assert all(row["lag/max"] <= MAX_LAG for row in trained)
    assert all(row["groups/played"] == GROUPS for row in trained)
    assert [len(groups) for groups in trained_on(run)] == [GROUPS] * STEPS
    assert json.loads((run / "status.json").read_text())["state"] == "succeeded"
    assert told["leased"] == 0, "all of it was acknowledged"
