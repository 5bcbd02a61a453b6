"""How a run of ranks ends, from outside: killed, stopped, asked to end; and how it goes on, on other ranks, too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_commands import ENVIRONMENT, TANDEM, here, ranks, train, write_spec

import tandem
from stopwatch import Stopwatch

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def begin(spec: Path, run: Path, count: int, *options: str) -> subprocess.Popen[str]:
    """Started, and in the middle of training."""
    command = [*TANDEM, "train", str(spec), "--run-dir", str(run), *ranks(count), *options]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + 120
    try:
        while time.monotonic() < until and steps_of(run) < 5:
            assert process.poll() is None
            time.sleep(0.1)
    except BaseException:
        process.kill()
        print(process.communicate()[0][-3000:])
        raise
    return process


def steps_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def others(run: Path) -> list[int]:
    """Processes of the other ranks, the first rank first; found by their command line."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if words[1:3] == ["-m", "tandem.recipes.follower"] and str(run) in words:
            found.append(int(entry.name))
    return sorted(found)


@pytest.mark.parametrize(("sent", "says"), [(signal.SIGKILL, "ended: signal 9"), (signal.SIGSTOP, "no sign of life")])
def test_a_rank_that_dies_ends_the_run_by_name_and_it_resumes_to_the_same_bytes(tmp_path, sent, says):
    spec, run = write_spec(tmp_path, steps=200), tmp_path / "run"
    process = begin(spec, run, 2, "--set", "parallel.deadline_s=6")
    try:
        (victim,) = others(run)
        os.kill(victim, sent)
        with Stopwatch() as watch:
            out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert watch.seconds < 6 + 30
    assert process.returncode == 6, "by the class of the failure"
    assert "rank 1 on host" in out
    assert says in out
    assert others(run) == []
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["failure"]["rule"]) == ("failed", "rank-lost")
    assert status["error"].startswith("RankLost: rank 1 on host")
    saved = [int(path.name.partition("-")[2]) for path in (run / "checkpoints").glob("step-*")]
    assert max(saved) <= steps_of(run), "nothing is saved without a rank"


def test_a_run_that_is_asked_to_end_saves_and_goes_on_with_other_ranks_to_the_same_bytes(tmp_path):
    spec, run, whole = write_spec(tmp_path, steps=40), tmp_path / "run", tmp_path / "whole"
    process = begin(spec, run, 2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out[-2000:]
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    assert others(run) == []
    here("resume", run, *ranks(1))
    here("train", spec, "--run-dir", whole)
    assert tandem.digest_run(run) == tandem.digest_run(whole)


def test_torchrun_starts_a_run(tmp_path):
    """And leaves a finished one alone: test_two_agents.py."""
    spec, run, one = write_spec(tmp_path), tmp_path / "run", tmp_path / "one"
    done = train(spec, run, "--go-on", launcher=(*TORCHRUN, "2"))
    assert done.returncode == 0, done.stderr[-2000:]
    here("train", spec, "--run-dir", one)
    assert tandem.digest_run(run) == tandem.digest_run(one)
