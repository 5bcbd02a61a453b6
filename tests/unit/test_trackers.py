"""Trackers that work, raise and hang, fed by rows of a run."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from stopwatch import Stopwatch
from tandem.obs.trackers.feed import Feed, openers


class Kept:
    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.rows.append((step, numbers))

    def close(self) -> None:
        self.closed = True


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
    assert [record.getMessage()[:36] for record in caplog.records] == ["track: bad failed, and is told nothi"]


def test_one_that_hangs_holds_nobody_up_and_takes_bounded_memory(caplog: pytest.LogCaptureFixture):
    go_on = threading.Event()

    class Hangs(Kept):
        def log(self, step: int, numbers: Mapping[str, float]) -> None:
            go_on.wait(30)

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


def test_a_tracker_that_is_not_installed_is_found_out_on_its_own_thread(tmp_path: Path):
    made = openers(["wandb", "mlflow"], directory=str(tmp_path), name="r", project="p", url="")
    assert list(made) == ["wandb", "mlflow"]
    assert not {"wandb", "mlflow", "trackio", "tensorboard"} & set(sys.modules)


TENSORBOARD = """
import sys
from tandem.obs.trackers.feed import Feed, openers
feed = Feed(openers(["tensorboard"], directory=sys.argv[1], name="r", project="p", url=""))
for step in range(1, 6):
    feed.row({"step": step, "stage": "rl", "reward/mean": step / 10})
feed.close(60)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1] + "/tensorboard").Reload()
print([(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")])
"""


def test_tensorboard_itself_reads_what_was_written(tmp_path: Path):
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-c", TENSORBOARD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]", done.stderr
