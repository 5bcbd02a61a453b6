"""The garbage collector passes over what a run's first steps have left, and visits all again when the run ends."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path

from tandem.errors import EngineLost
from tandem.obs.live_view import LiveView
from tandem.runs.lease import DirectoryLease
from tandem.runs.run import Run


def run_in(directory: Path) -> Run:
    directory.mkdir()
    lease = DirectoryLease(directory)
    return Run(directory, name="run", recipe="sft", view=LiveView("run"), lease=lease)


def test_what_is_there_after_two_steps_is_passed_over_until_the_run_ends(tmp_path: Path):
    assert gc.get_freeze_count() == 0
    passed_over: list[bool] = []
    with suppress(EngineLost), run_in(tmp_path / "run") as run:
        for step in (1, 2, 3):
            passed_over.append(gc.get_freeze_count() > 10_000)
            run.record(step, {"time/step_s": 0.1})
        passed_over.append(gc.get_freeze_count() > 10_000)
        raise EngineLost("however it ends")
    assert passed_over == [False, False, True, True]
    assert gc.get_freeze_count() == 0


def test_a_process_that_passed_over_its_objects_before_goes_on_to(tmp_path: Path):
    gc.freeze()
    try:
        with run_in(tmp_path / "run") as run:
            run.record(1, {})
            run.record(2, {})
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
