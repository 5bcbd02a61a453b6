"""`tandem watch` on a run that begins, is killed, is resumed, and ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tandem.errors import RunError
from tandem.runs.watch import look, watch_run

RUN = """
import json, os, sys, time
from pathlib import Path
from tandem.io.atomic_write import write_json
from tandem.io.jsonl import JsonlWriter
from tandem.runs.liveness import ProgressCounter
home, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
progress = ProgressCounter(home, setup_s=20, step_s=5)
events, metrics = JsonlWriter(home / "events.jsonl"), JsonlWriter(home / "metrics.jsonl")
def status(state, **more):
    write_json(home / "status.json", {"state": state, "steps_total": 6, **more})  # as runs do: whole or not at all
events.write({"number": first + 1, "at": "", "stage": "boot"})
status("running")
progress.stage("rl")
for step in range(first, last):
    time.sleep(0.05)
    metrics.write({"step": step + 1, "reward/mean": step / 10})
    progress.step(step + 1)
progress.write()
if last < 6:
    time.sleep(60)
status("succeeded", verdict="improved")
"""


def begin(home: Path, first: int, last: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RUN, str(home), str(first), str(last)])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.toml").touch()
    return tmp_path / "run"


def test_a_watch_goes_on_through_a_kill_and_a_resume(home: Path):
    told: list[str] = []
    ended: list[str] = []
    watching = threading.Thread(target=lambda: ended.append(watch_run(home, tell=told.append, poll_s=0.02)))
    watching.start()

    def waits_for(text: str) -> None:
        until = time.monotonic() + 20
        while not any(text in line for line in told):
            assert time.monotonic() < until, told
            time.sleep(0.02)

    waits_for("queued, not begun")
    killed = begin(home, 0, 3)
    waits_for("rl step 3/6 · reward 0.2")
    waits_for("running, moves")
    killed.kill()
    killed.wait()
    waits_for(f"gone · its process is gone; `tandem resume {home}` continues it")
    assert begin(home, 3, 6).wait() == 0
    watching.join(20)
    assert ended == ["succeeded"]
    waits_for("succeeded, ended · improved")
    assert [line for line in told if "boot" in line] == ["event 1 boot", "event 4 boot"]
    assert len(told) == len(set(told)) or sum("running" in line for line in told) <= 4


def test_once_tells_what_is_there_and_returns(home: Path):
    told: list[str] = []
    status = {
        "state": "failed",
        "error": "OSError: [Errno 28] No space left on device",
        "failure": {"class": "infra_retriable", "rule": "disk-full", "next": "free space", "retriable": True},
    }
    (home / "status.json").write_text(json.dumps(status))
    (home / "events.jsonl").write_text('{"number": 1, "stage": "boot"}\n{"number": 2, "stage": "err')  # torn
    assert watch_run(home, once=True, tell=told.append) == "failed"
    assert told[1:4] == [
        "failed, ended",
        "   OSError: [Errno 28] No space left on device",
        "   next: free space (failure class infra_retriable, rule disk-full)",
    ]
    assert told[4:] == ["event 1 boot"]


def test_json_is_one_object_a_line(home: Path):
    told: list[str] = []
    begin(home, 0, 6).wait()
    assert watch_run(home, as_json=True, tell=told.append, poll_s=0.02) == "succeeded"
    (row,) = [json.loads(line) for line in told]
    assert (row["step"], row["steps_total"], row["liveness"], row["metrics"]["reward/mean"]) == (6, 6, "ended", 0.5)


def test_a_run_that_is_to_be_started_again_has_not_ended(home: Path):
    from tandem.io.process_identity import identity

    (home / "status.json").write_text('{"state": "failed"}')
    (home / "supervisor.json").write_text(json.dumps({"process": identity()}))
    assert look(home)["supervised"]
    (home / "supervisor.json").write_text(json.dumps({"process": f"{os.getpid()}:1"}))  # a number that was given again
    assert not look(home)["supervised"]


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(RunError):
        watch_run(tmp_path, once=True)
