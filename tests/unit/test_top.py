"""`tandem top`: all runs of a directory in one table, and again every second on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tandem.cli.top import frame
from tandem.io.process_identity import identity

HOSTILE = "\x1b]0;owned\x07\x1b[2J red"


def write_run(place: Path, status: dict[str, Any], *rows: dict[str, Any], alive: bool = False) -> None:
    place.mkdir()
    (place / "spec.toml").write_text('recipe = "rl"\n')
    (place / "status.json").write_text(json.dumps({"recipe": "rl", "steps_total": 9, **status}))
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if alive:
        sign = {"process": identity(), "ticks": 5, "stage": "rl", "step": 4, "limit_s": 3000.0}
        (place / "progress.json").write_text(json.dumps(sign))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "alive", {"state": "running"}, {"step": 4, "reward/mean": 0.25}, alive=True)
    write_run(tmp_path / "vanished", {"state": "running"}, {"step": 2})
    scores = {"eval": {"metric": "accuracy", "before_rl": 0.05, "after": 0.53}}
    write_run(tmp_path / "better", {"state": "succeeded", "verdict": "improved", **scores}, {"step": 9})
    write_run(tmp_path / "worse", {"state": "failed", "error": f"the disk is full {HOSTILE}\nsecond line"}, {"step": 1})
    return tmp_path


def once(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem", "top", *words]
    env = os.environ | {"COLUMNS": "150", "TANDEM_CONTROL": ""}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)


def test_the_table_says_what_each_run_does_and_those_that_run_come_first(runs: Path):
    told = once(str(runs)).stdout
    head, _, *lines = [line.rstrip() for line in told.splitlines()]
    assert "1 running" in head
    assert "1 gone" in head
    line = {each.split()[0]: each for each in lines}
    assert next(iter(line)) == "alive"
    assert line["alive"].split()[1:4] == ["running", "4/9", "━" * 7]
    assert line["alive"].endswith("reward 0.25")
    assert "its process is gone; tandem resume vanished" in line["vanished"]
    assert "5.0 % → 53.0 % improved" in line["better"]
    assert line["worse"].endswith("the disk is full ]0;owned[2J red")
    assert "\x1b" not in told


def test_an_empty_directory_says_what_to_do_and_a_missing_one_is_refused(tmp_path: Path):
    assert "tandem init" in once(str(tmp_path)).stdout
    missing = once(str(tmp_path / "nowhere"))
    assert missing.returncode == 2
    assert "is not a directory" in missing.stderr


def test_more_runs_than_lines_are_counted():
    rows = [
        {"run": f"r{n}", "title": f"r{n}", "state": "succeeded", "step": 0, "metric": "loss"} for n in range(1000)
    ]  # fmt: skip
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(frame(rows, "runs", 20))
    assert "and 980 runs more" in console.export_text()


def test_on_a_terminal_it_follows_and_ctrl_c_ends_it_in_order(runs: Path):
    ours, theirs = pty.openpty()
    env = os.environ | {"COLUMNS": "150", "LINES": "40", "TERM": "xterm", "TANDEM_CONTROL": ""}
    command = [sys.executable, "-m", "tandem", "top", str(runs)]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # where the suite ignores it
    )  # fmt: skip
    os.close(theirs)
    try:
        assert _reads(ours, "reward 0.25")
        with (runs / "alive/metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "reward/mean": 0.75}\n')
        assert _reads(ours, "reward 0.75")
        process.send_signal(signal.SIGINT)
        _reads(ours, "never")  # its last words
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _reads(fd: int, wanted: str, seconds: float = 60.0) -> bool:
    """Whether the terminal shows this in time; False if it was closed before."""
    until, seen = time.monotonic() + seconds, b""
    while time.monotonic() < until:
        if not select.select([fd], [], [], 0.2)[0]:
            continue
        try:
            seen += os.read(fd, 2**16)
        except OSError:  # the other end is closed
            return False
        if wanted.encode() in seen:
            return True
    return False
