"""A supervisor and real processes that fail in every way. What they run is a few lines; the waits are shortened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import RunOwned
from tandem.io.process_identity import identity
from tandem.runs.lease import DirectoryLease
from tandem.runs.supervise import BUDGETS, Budget, Supervisor, smaller_micro_batch, supervisor_of
from tandem.spec.load import load_spec, to_toml

QUICK = {name: Budget(budget.restarts, 0.01, 0.02) for name, budget in BUDGETS.items()}

# What a run does here, by the number of its attempt: `case` is a list of lines of Python.
RUN = """
import json, os, signal, sys, threading, time
from pathlib import Path
from tandem.runs.liveness import ProgressCounter, Watchdog
home, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
home.mkdir(exist_ok=True)
(home / "spec.toml").touch()
attempt = len((home / "starts").read_text()) if (home / "starts").exists() else 0
with (home / "starts").open("a") as file:
    file.write("r" if "resume" in sys.argv else "b")
progress = ProgressCounter(home, setup_s=20, step_s=0.6)
watchdog = Watchdog(progress, home / "stacks.txt", lambda *_: None)
watchdog.start()
def fails(name, steps=0):
    status = {"state": "failed", "steps_done": steps, "attempt": attempt,
              "failure": {"class": name, "rule": "r", "next": "n", "retriable": name not in ("user", "data")}}
    (home / "status.json").write_text(json.dumps(status))
    sys.exit(1)
def step(number):
    progress.step(number)
exec(cases[min(attempt, len(cases) - 1)])
"""


def supervisor(tmp_path: Path, *cases: str, **options: Any) -> tuple[Supervisor, list[str]]:
    said: list[str] = []
    home, scripts = tmp_path / "run", json.dumps([textwrap.dedent(case) for case in cases])
    command = [sys.executable, "-c", RUN, str(home), scripts]
    budgets = options.pop("budgets", QUICK)
    made = Supervisor(command, [*command, "resume"], home, say=said.append, budgets=budgets, **options)
    return made, said


def starts(tmp_path: Path) -> str:
    return (tmp_path / "run" / "starts").read_text()


def attempts(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()]


def test_what_may_pass_is_resumed_until_it_is_done(tmp_path: Path):
    made, said = supervisor(tmp_path, "fails('infra_retriable')", "os.kill(os.getpid(), 9)", "pass")
    assert made.run() == 0
    assert starts(tmp_path) == "brr"
    rows = attempts(tmp_path)
    assert [row.get("failure", {}).get("class") for row in rows] == ["infra_retriable", "infra_retriable", None]
    assert rows[1]["failure"]["rule"] == "killed"
    assert "restart 2 of 5" in said[3]


@pytest.mark.parametrize("name", ["user", "data"])
def test_what_a_user_must_change_is_not_tried_again(tmp_path: Path, name: str):
    made, said = supervisor(tmp_path, f"fails('{name}')")
    assert made.run() == {"user": 2, "data": 3}[name]
    assert starts(tmp_path) == "b"
    assert "not again: n" in said[1]


def test_a_budget_ends_and_the_status_says_how(tmp_path: Path):
    made, _ = supervisor(
        tmp_path, "(home / 'status.json').write_text('{\"state\": \"running\"}'); os.kill(os.getpid(), 9)"
    )
    assert made.run() == 6
    assert starts(tmp_path) == "brrrrr"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["failure"]["class"]) == ("failed", "infra_retriable")


def test_a_budget_begins_anew_with_every_step_that_none_had_reached(tmp_path: Path):
    made, _ = supervisor(tmp_path, *[f"fails('infra_retriable', {step})" for step in range(1, 9)], "pass")
    assert made.run() == 0
    assert len(starts(tmp_path)) == 9


def test_out_of_memory_is_tried_with_less_and_said(tmp_path: Path):
    left = ["micro_tokens 1024 -> 512", "micro_tokens 512 -> 256"]
    dies = "print('torch.OutOfMemoryError: CUDA out of memory.', file=sys.stderr); sys.exit(1)"
    made, said = supervisor(tmp_path, dies, dies, "pass", smaller=lambda: left.pop(0))
    assert made.run() == 0
    assert [row["then"].partition(";")[0] for row in attempts(tmp_path)[:2]] == [
        "micro_tokens 1024 -> 512",
        "micro_tokens 512 -> 256",
    ]
    assert any("micro_tokens 512 -> 256" in line for line in said)


def test_out_of_memory_that_cannot_be_made_smaller_ends_it(tmp_path: Path):
    made, _ = supervisor(tmp_path, "fails('out_of_memory')", smaller=lambda: "")
    assert made.run() == 5
    assert starts(tmp_path) == "b"


def test_a_run_that_stands_still_is_ended_with_its_stacks_and_resumed(tmp_path: Path):
    hangs = "step(1); lock = threading.Lock(); lock.acquire(); lock.acquire()"
    stops = "step(1); os.kill(os.getpid(), signal.SIGSTOP)"
    made, _ = supervisor(tmp_path, hangs, stops, "[(time.sleep(0.1), step(n)) for n in range(15)]")
    started = time.monotonic()
    assert made.run() == 0
    assert time.monotonic() - started < 20
    rows = attempts(tmp_path)
    assert [row.get("failure", {}).get("class") for row in rows] == ["stalled", "stalled", None]
    assert "lock.acquire" in (text := (tmp_path / "run" / "stacks.txt").read_text()) or "<string>" in text


def test_being_asked_to_end_is_passed_on_and_nothing_starts_again(tmp_path: Path):
    case = """
        def save(*_):
            (home / "saved").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        (home / "up").touch()
        time.sleep(30)
    """
    made, _ = supervisor(tmp_path, case)

    def ask() -> None:
        while not (tmp_path / "run" / "up").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    assert made.run() == 0
    assert (tmp_path / "run" / "saved").exists()
    assert starts(tmp_path) == "b"
    assert attempts(tmp_path)[0]["then"] == "asked to end"


def test_being_asked_to_end_while_it_waits_ends_the_wait(tmp_path: Path):
    budgets = {**QUICK, "infra_retriable": Budget(5, 30.0, 30.0)}
    made, said = supervisor(tmp_path, "fails('infra_retriable')", budgets=budgets)

    def ask() -> None:
        while len(said) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    assert made.run() == 128 + signal.SIGTERM
    assert starts(tmp_path) == "b"


def test_the_run_does_not_outlive_a_supervisor_that_is_killed(tmp_path: Path):
    cases = json.dumps(["(home / 'pid').write_text(str(os.getpid())); time.sleep(60)"])
    command = [sys.executable, "-c", RUN, str(tmp_path / "run"), cases]
    code = f"""
        from pathlib import Path
        from tandem.runs.supervise import Supervisor
        Supervisor({command!r}, [], Path({str(tmp_path / "run")!r})).run()
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    until = time.monotonic() + 20
    while not (pid_file := tmp_path / "run" / "pid").exists() or not pid_file.read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    pid = int(pid_file.read_text())
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the run is still there")


def test_a_smaller_micro_batch_leaves_the_effective_batch(tmp_path: Path):
    quickstart = load_spec(Path(__file__).parents[2] / "examples" / "quickstart.toml", ("train.micro_tokens=1024",))
    (tmp_path / "spec.toml").write_text(to_toml(quickstart))
    assert "1024 -> 512" in smaller_micro_batch(tmp_path)
    smaller: Any = load_spec(tmp_path / "spec.toml")
    assert smaller.train.micro_tokens == 512
    assert smaller.train.groups_per_step == quickstart.train.groups_per_step  # type: ignore[union-attr]
    (tmp_path / "plan.json").write_text('{"largest_micro_tokens": 300}')
    assert "512 -> 256" in smaller_micro_batch(tmp_path)  # the plan's is more: that was not enough
    assert smaller_micro_batch(tmp_path) == ""


def test_a_smaller_micro_batch_is_the_plan_s_where_that_is_less_than_half(tmp_path: Path):
    quickstart = load_spec(Path(__file__).parents[2] / "examples" / "quickstart.toml", ("train.micro_tokens=2048",))
    (tmp_path / "spec.toml").write_text(to_toml(quickstart))
    (tmp_path / "plan.json").write_text('{"largest_micro_tokens": 300}')
    assert "2048 -> 300" in smaller_micro_batch(tmp_path)
    smaller: Any = load_spec(tmp_path / "spec.toml")
    assert smaller.train.micro_tokens == 300


def test_a_run_that_another_process_works_on_keeps_its_status_and_its_supervisor(tmp_path: Path):
    owner, _ = supervisor(tmp_path, "sys.exit(2)")
    run = owner.directory
    run.mkdir()
    (run / "spec.toml").touch()
    lease = DirectoryLease(run)
    (run / "status.json").write_text('{"state": "running"}')
    (run / "supervisor.json").write_text(json.dumps({"process": "1:1"}))
    assert owner.run() == 2
    assert json.loads((run / "status.json").read_text()) == {"state": "running"}
    assert lease.holds()
    lease.close()
    (run / "supervisor.json").write_text(json.dumps({"process": identity(os.getppid())}))
    with pytest.raises(RunOwned, match=rf"process {os.getppid()} supervises this run"):
        owner.run()
    assert supervisor_of(run) == identity(os.getppid())
