"""Trackers that work, raise and hang, fed by rows of a run."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from stopwatch import Stopwatch
from tandem.obs.trackers.tracker_process import TrackerTarget, openers
from tandem.obs.trackers.tracker_queue import Feed


class Kept:
    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.rows.append((step, numbers))

    def close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        raise AssertionError("only one that hangs is killed")


class Raises(Kept):
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        raise RuntimeError("the server is on holiday")


def unavailable() -> Kept:
    raise ModuleNotFoundError("No module named 'wandb'")


def row(step: int) -> dict[str, object]:
    return {"step": step, "stage": "rl", "loss/total": step / 2, "lag/max": float("nan")}


def test_every_row_arrives_in_order_with_its_numbers_alone():
    kept = Kept()
    feed = Feed({"kept": lambda: kept})
    for step in range(500):
        feed.row(row(step))
    feed.close()
    assert kept.rows == [(step, {"loss/total": step / 2}) for step in range(500)]
    assert kept.closed


@pytest.mark.parametrize("opener", [Raises, unavailable])
def test_one_that_fails_is_warned_of_once_and_others_go_on(opener: type[Kept], caplog: pytest.LogCaptureFixture):
    kept = Kept()
    with caplog.at_level(logging.WARNING):
        feed = Feed({"bad": opener, "kept": lambda: kept})
        for step in range(50):
            feed.row(row(step))
        feed.close()
    assert len(kept.rows) == 50
    assert [record.getMessage()[:36] for record in caplog.records] == ["track: bad failed and gets no more r"]


def test_one_that_hangs_holds_nobody_up_and_takes_bounded_memory(caplog: pytest.LogCaptureFixture):
    go_on = threading.Event()

    class Hangs(Kept):
        def log(self, step: int, numbers: Mapping[str, float]) -> None:
            go_on.wait(30)

        def kill(self) -> None:
            go_on.set()

    try:
        with caplog.at_level(logging.WARNING):
            feed = Feed({"slow": Hangs}, waiting_rows=16)
            with Stopwatch() as watch:
                for step in range(2000):
                    feed.row(row(step))
            assert watch.seconds < 0.5
            with Stopwatch() as watch:
                feed.close(within_s=0.2)
            assert watch.seconds < 1.0
        assert len(caplog.records) == 1
    finally:
        go_on.set()


# Trackers run in processes of their own: the main thread imports torch while they open, as a run's does.
TENSORBOARD = """
import sys
from tandem.obs.trackers.tracker_queue import Feed
from tandem.obs.trackers.tracker_process import TrackerTarget, openers
feed = Feed(openers(["tensorboard"], TrackerTarget(sys.argv[1], "r", "p", "")), tell=print)
import torch
assert "tensorboard" not in sys.modules
for step in range(1, 6):
    feed.row({"step": step, "stage": "rl", "reward/mean": step / 10})
feed.close(60)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1] + "/tensorboard").Reload()
print([(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")])
"""


def test_tensorboard_itself_reads_what_was_written_while_the_run_imported_torch(tmp_path: Path):
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-c", TENSORBOARD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]", done.stdout + done.stderr


WANDB = """
import os, sys, time
{at_import}
class Run:
    def log(self, row, step):
        print("row", step, row)
        {at_log}
    def finish(self):
        {at_close}
def init(**options):
    {at_init}
    return Run()
"""
FAULTS = {
    "import": (
        {"at_import": "raise ImportError('half installed')"},
        "gets no more rows",
        "ImportError: half installed",
    ),
    "crash": ({"at_import": "os._exit(7)"}, "gets no more rows", "exit code 7"),
    "login": ({"at_init": "input('key: ')"}, "gets no more rows", "EOFError"),
    "write": ({"at_log": "raise RuntimeError('on holiday')"}, "gets no more rows", "RuntimeError: on holiday"),
    "close": ({"at_close": "raise RuntimeError('too late')"}, "gets no more rows", "RuntimeError: too late"),
    "exit": ({"at_close": "sys.exit('bye')"}, "gets no more rows", "bye"),
    "hang": ({"at_init": "time.sleep(300)"}, "did not end in time", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_library_does_the_run_goes_on_and_one_sentence_says_it(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A real process that imports a library which fails in one place."""
    code, ends, why = FAULTS[fault]
    places = {"at_import": "pass", "at_log": "pass", "at_close": "pass", "at_init": "pass"} | code
    (tmp_path / "wandb.py").write_text(WANDB.format(**places))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told: list[str] = []
    feed = Feed(openers(["wandb"], TrackerTarget(str(tmp_path), "r", "p", "")), tell=told.append)
    for step in range(20):
        feed.row(row(step))
    feed.close(within_s=1.0 if fault == "hang" else 60.0)
    assert [ends in line and why in line and line.startswith("track: wandb") for line in told] == [True], told
    assert "wandb" not in sys.modules


def test_a_tracker_ends_with_the_process_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run is killed: its tracker reads the end of the rows, closes, and is gone."""
    (tmp_path / "wandb.py").write_text(WANDB.format(at_import="", at_log="pass", at_close="print('over')", at_init=""))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = (
        "import os, sys, time; from tandem.obs.trackers.tracker_process import *\n"
        "one = TrackerProcess('wandb', TrackerTarget(sys.argv[1], 'r', 'p', ''))\n"
        "one.log(1, {'loss': 2.0}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    log = tmp_path / "trackers" / "wandb.log"
    until = time.monotonic() + 60
    while "over" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert log.read_text().split() == ["row", "1", "{'loss':", "2.0}", "over"]
