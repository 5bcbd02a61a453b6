"""The whole way: a real `tandem control serve`, its local provider, and the command line of a user.

The target's command is a stand-in for the agent, whose trainer writes a row at a given pace.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stopwatch import Stopwatch
from tandem.client import Tandem

STANDIN = Path(__file__).with_name("standin_agent.py")
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


class Control:
    """A server's process, and a user's commands against it."""

    def __init__(self, home: Path) -> None:
        self.home, self.data = home, home / "data"
        (home / "targets.toml").write_text(
            f'[targets.here]\nkind = "local"\ndirectory = "{home}/jobs"\ntandem = "{home}/tandem"\nusd_per_hour = 3.6\n'
        )
        # A job sees only a login's variables, and this Python may be no login's.
        (home / "tandem").write_text(
            f'#!/bin/sh\nSTANDIN_PACE_S=0.25 STANDIN_HELD_BY="{home}/held" exec "{sys.executable}" "{STANDIN}" "$@"\n'
        )
        (home / "tandem").chmod(0o755)
        self.env = os.environ | {
            "TANDEM_CONTROL": str(self.data), "XDG_CACHE_HOME": str(home / "cache"), "HOME": str(home),
        }  # fmt: skip
        self.process: subprocess.Popen[str] | None = None
        self.port = 0

    def start(self) -> None:
        (self.data / "ready.json").unlink(missing_ok=True)
        command = self.command(
            "control", "serve", "--data-dir", str(self.data), "--targets", str(self.home / "targets.toml"), "--port",
            str(self.port),
        )  # fmt: skip
        self.process = subprocess.Popen(
            command, env=self.env, cwd=self.home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        until(lambda: (self.data / "ready.json").exists() or self.process.poll() is not None, 60)  # type: ignore[union-attr]
        assert (self.data / "ready.json").exists(), self.process.communicate()
        url = json.loads((self.data / "ready.json").read_text())["url"]
        self.port = int(url.rpartition(":")[2])

    def end(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.communicate(timeout=20)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "tandem", *words]

    def run(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(self.command(*words), env=self.env, cwd=self.home, capture_output=True, text=True)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout

    def jobs(self) -> list[Path]:
        return list((self.home / "jobs").glob("tandem-*"))

    def living(self) -> list[bytes]:
        """The command lines of this server's agents that live."""
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        return [line for line in lines if str(STANDIN).encode() in line and str(self.port).encode() in line]

    def client(self) -> Tandem:
        url = json.loads((self.data / "ready.json").read_text())["url"]
        return Tandem(url, (self.data / "token").read_text().strip())


def until(condition: Callable[[], object], seconds: float) -> None:
    by = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < by, "it took too long"
        time.sleep(0.05)


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    made = Control(tmp_path)
    made.start()
    yield made
    if made.process is not None and made.process.poll() is None:
        made.end(signal.SIGKILL)


def submitted(control: Control, name: str) -> str:
    words = ("submit", str(QUICKSTART), "--target", "here", "--max-cost", "5", "--name", name, "--yes", "--detach")
    found = re.search(r"run_[a-z2-7]{26}", control.run(*words))
    assert found
    return found.group()


def test_a_run_is_submitted_watched_left_and_pulled_byte_by_byte(control: Control):
    (control.home / "held").touch()
    words = ("submit", str(QUICKSTART), "--target", "here", "--max-cost", "5", "--name", "rows-8", "--yes")
    follower = subprocess.Popen(
        control.command(*words), env=control.env, cwd=control.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip  # a suite in the background ignores Ctrl-C, and its children with it
    assert follower.stdout
    told = ""
    while "rl step" not in told:
        line = follower.stdout.readline()
        assert line, (told, follower.communicate())
        told += line
    assert "Estimate for cpu" in told
    assert "stopped before it costs more than 5 USD" in told
    follower.send_signal(signal.SIGINT)
    _, error = follower.communicate(timeout=60)
    run = re.search(r"run_[a-z2-7]{26}", told)
    assert run
    assert f"{run.group()} goes on" in error
    with control.client() as client:
        assert client.run(run.group()).info().state == "running"
        (control.home / "held").unlink()
        assert client.run(run.group()).wait().state == "succeeded"
    control.run("pull", run.group(), "--dir", "pulled")
    [job] = control.jobs()
    same, differ, missing = filecmp.cmpfiles(
        job / "run", control.home / "pulled", [path.name for path in (job / "run").iterdir()], shallow=False
    )
    assert (len(same), differ, missing) == (4, [], [])
    assert "succeeded, ended" in control.run("watch", run.group(), "--once")
    assert control.run("logs", run.group()).endswith("step 8\n")
    assert json.loads(control.run("runs", "--json"))[0]["verdict"] == "improved"
    assert [each["target"] for each in json.loads(control.run("targets", "--server", "--json"))] == ["here"]
    assert "8/8" in control.run("top", "--once")


def test_a_cancel_ends_the_processes_within_ten_seconds(control: Control):
    run = submitted(control, "rows-1000")
    with control.client() as client:
        until(lambda: client.run(run).info().state == "running", 60)
        assert control.living()
        with Stopwatch() as watch:
            assert json.loads(control.run("cancel", run, "--json"))["want"] == "cancel"
            assert client.run(run).wait().state == "cancelled"
            until(lambda: not control.living(), 30)
        assert watch.seconds < 10
    control.run("resume", run, "--supervise", code=2)  # of a directory
    resumed = json.loads(control.run("resume", run, "--max-cost", "7", "--json"))
    assert (resumed["state"], resumed["max_cost_usd"]) == ("queued", 7.0)
    control.run("cancel", run)
    with control.client() as client:
        assert client.run(run).wait().state == "cancelled"
    until(lambda: not control.living(), 30)


def test_a_server_that_is_killed_goes_on_where_it_was_and_no_run_is_trained_twice(control: Control):
    runs = [submitted(control, f"rows-{count}") for count in (1, 24, 40)]
    for _ in range(3):
        time.sleep(1.0)
        control.end(signal.SIGKILL)
        control.start()
    with control.client() as client:
        for run in runs:
            assert client.run(run).wait().state == "succeeded"
            assert [each.why for each in client.run(run).attempts()] == ["succeeded"]
    assert len(control.jobs()) == 3


def test_a_backup_of_a_running_server_is_restored_and_a_damaged_one_is_refused(control: Control):
    run = submitted(control, "rows-2")
    with control.client() as client:
        client.run(run).wait()
        key = client.make_key("k", ["runs:read"]).key
    control.run("control", "backup", "copy", "--data-dir", "data")
    control.run("control", "doctor", "--data-dir", "data")
    control.run("control", "backup", "copy", "--data-dir", "data", code=2)  # it exists
    control.run("control", "restore", "copy", "--data-dir", "data", code=2)  # it is not empty
    submitted(control, "rows-1")
    control.end(signal.SIGTERM)
    shutil.rmtree(control.data)
    control.run("control", "restore", "copy", "--data-dir", "data")
    control.start()
    with control.client() as client:
        assert [each.id for each in client.runs()] == [run]
        assert client.run(run).read("log.txt")[0] == b"step 1\nstep 2\n"
        with Tandem(client.url, key) as reader:
            assert reader.run(run).info().state == "succeeded"
    database = control.home / "copy" / "control.sqlite3"
    database.write_bytes(database.read_bytes()[:9000] + b"\xff" * 40_000)
    control.run("control", "restore", "copy", "--data-dir", "elsewhere", code=1)
    assert not (control.home / "elsewhere").exists()


def test_a_submit_from_the_light_install_shows_the_servers_estimate(control: Control):
    """As it is there: what the planner imports is missing."""
    code = (
        "import sys\n"
        "for missing in ('torch', 'numpy', 'transformers'): sys.modules[missing] = None\n"
        f"sys.argv = ['tandem', 'submit', {str(QUICKSTART)!r}, '--target', 'here', '--detach']\n"
        "from tandem.cli.main import main; main()"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=control.home, env=control.env, input="n\n", capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "The server's estimate for cpu, with usual lengths" in told.stdout, told
    assert "USD" in told.stdout
    assert control.jobs() == []
