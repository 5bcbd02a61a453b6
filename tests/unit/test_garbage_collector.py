"""What the first steps of a stage have left is frozen for Python's garbage collector until the stage or run ends."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.errors import EngineLost, RunFenced
from tandem.obs.live_view import LiveView
from tandem.runs.lease import DirectoryLease
from tandem.runs.run import Run
from tandem.train.trainer import PolicyTrainer


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


def test_it_ends_where_python_had_frozen_something_before(tmp_path: Path):
    gc.freeze()  # as Python 3.12 does when it starts
    with run_in(tmp_path / "run") as run:
        run.record(1, {})
        run.record(2, {})
    assert gc.get_freeze_count() == 0


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


def test_after_a_run_its_trainer_is_gone_and_the_gpu_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainers: list[weakref.ref[PolicyTrainer]] = []
    left_when_emptied: list[bool] = []
    made = PolicyTrainer.__init__

    def seen(self: PolicyTrainer, *given: Any, **more: Any) -> None:
        made(self, *given, **more)
        trainers.append(weakref.ref(self))

    monkeypatch.setattr(PolicyTrainer, "__init__", seen)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left_when_emptied.append(trainers[-1]() is not None))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say a.", "completion": "a"}\n' * 12)
    spec = {
        "recipe": "sft", "model": {"preset": "tiny"}, "data": {"kind": "file", "path": str(tmp_path / "rows.jsonl")},
        "train": {"steps": 3, "lr": 1e-3, "batch_size": 2}, "eval": {"examples": 2}, "checkpoint": {"every": 0},
    }  # fmt: skip
    gc.disable()  # what is freed is freed by the run, and not by chance
    try:
        with monkeypatch.context() as on_gpu:
            on_gpu.setattr(torch.cuda, "is_initialized", lambda: True)
            on_gpu.setattr(torch.cuda, "synchronize", lambda: None)
            tandem.run(tandem.parse_spec(spec), tmp_path / "run")
    finally:
        gc.enable()
    assert len(trainers) == 1
    assert left_when_emptied[-1:] == [False]
