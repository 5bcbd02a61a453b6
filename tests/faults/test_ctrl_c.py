"""Ctrl-C: once in a real process, and twice in this one."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from small_runs import sft, torch_as_it_was, train
from test_run_resumed import at_row

from tandem.recipes.sweep import sweep
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.run import StoppedByHand
from tandem.spec.load import parse_spec, to_toml

__all__ = ["torch_as_it_was"]

TANDEM = Path(sys.executable).with_name("tandem")


def state(run: Path) -> str:
    return json.loads((run / "status.json").read_text())["state"]


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path):
    spec, run = tmp_path / "spec.toml", tmp_path / "run"
    spec.write_text(to_toml(parse_spec(sft(tmp_path, steps=100_000, every=1_000_000))))  # saved by the signal alone
    command = [TANDEM, "train", spec, "--run-dir", run]
    with (tmp_path / "said.txt").open("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            metrics, until = run / "metrics.jsonl", time.monotonic() + 200
            while process.poll() is None and time.monotonic() < until:
                if metrics.exists() and metrics.read_bytes().count(b"\n") >= 2:
                    break
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=100) == 130
        finally:
            process.kill()
            process.wait()
    told = (tmp_path / "said.txt").read_text()
    (saved,) = Checkpoints(run).versions()
    assert state(run) == "stopped"
    assert re.search(rf"tandem resume {run} +continue from step {saved}\n", told)
    assert "Traceback" not in told


@pytest.mark.usefixtures("one_thread", "torch_as_it_was")
def test_a_second_ctrl_c_ends_at_once_and_saves_nothing(tmp_path: Path):
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    run = tmp_path / "run"
    with at_row(4, run, twice), pytest.raises(KeyboardInterrupt) as ended:
        train(sft(tmp_path, every=100), run)
    assert not isinstance(ended.value, StoppedByHand)
    assert Checkpoints(run).versions() == []
    assert state(run) == "cancelled"


@pytest.mark.usefixtures("one_thread", "torch_as_it_was")
def test_ctrl_c_of_a_run_that_saves_nothing_cancels_it(tmp_path: Path):
    run = tmp_path / "run"
    with at_row(2, run, partial(signal.raise_signal, signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        train(sft(tmp_path, every=0), run)
    assert state(run) == "cancelled"


@pytest.mark.usefixtures("one_thread", "torch_as_it_was")
def test_ctrl_c_ends_a_sweep_and_says_how_to_go_on(tmp_path: Path):
    said = io.StringIO()
    first = tmp_path / "sweep" / "seed-0"
    with at_row(2, first, partial(signal.raise_signal, signal.SIGINT)), pytest.raises(StoppedByHand):
        sweep(sft(tmp_path, every=100), [0, 1], tmp_path / "sweep", console=Console(file=said, width=200))
    assert state(first) == "stopped"
    assert not (tmp_path / "sweep" / "seed-1").exists()
    assert f"to resume it, give the same command with --dir {tmp_path / 'sweep'}" in said.getvalue()
