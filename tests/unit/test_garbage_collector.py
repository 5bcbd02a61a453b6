"""What the first steps of a stage have left is frozen for Python's garbage collector until the stage or run ends."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from pathlib import Path

import pytest

from tandem.errors import EngineLost, RunFenced
from tandem.obs.live_view import LiveView
from tandem.runs.lease import DirectoryLease
from tandem.runs.run import Run


def run_in(directory: Path) -> Run:
    directory.mkdir()
    lease = DirectoryLease(directory)
    return Run(directory, name="run", recipe="sft", view=LiveView("run"), lease=lease)


def test_what_is_there_after_two_steps_is_frozen_until_the_run_ends(tmp_path: Path):
    assert gc.get_freeze_count() == 0
    frozen: list[bool] = []
    with suppress(EngineLost), run_in(tmp_path / "run") as run:
        for step in (1, 2, 3):
            frozen.append(gc.get_freeze_count() > 10_000)
            run.record(step, {"time/step_s": 0.1})
        frozen.append(gc.get_freeze_count() > 10_000)
        raise EngineLost("however it ends")
    assert frozen == [False, False, True, True]
    assert gc.get_freeze_count() == 0


def test_what_a_process_had_frozen_stays_frozen(tmp_path: Path):
    gc.freeze()
    try:
        with run_in(tmp_path / "run") as run:
            run.record(1, {})
            run.record(2, {})
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


class OfWarmup:
    """As a trainer, it is part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_stage_leaves_is_freed_in_the_next_one(tmp_path: Path):
    with run_in(tmp_path / "run") as run:
        run.stage("warmup", 3)
        trainer = OfWarmup()
        left = weakref.ref(trainer)
        for step in (1, 2, 3):
            run.record(step, {})
        assert gc.get_freeze_count() > 10_000
        del trainer
        run.stage("rl", 3)
        for step in (4, 5, 6):
            run.record(step, {})
        assert left() is None
        assert gc.get_freeze_count() > 10_000


def test_nothing_stays_frozen_after_a_run_that_another_process_took_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fenced(lease: DirectoryLease) -> None:
        raise RunFenced("run: another process owns it")

    with suppress(RunFenced), run_in(tmp_path / "run") as run:
        run.record(1, {})
        run.record(2, {})
        monkeypatch.setattr(DirectoryLease, "check", fenced)
    assert gc.get_freeze_count() == 0
