"""What the first steps of a stage have left is frozen for Python's garbage collector until the stage or run ends."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
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


def test_a_stage_of_one_step_is_freed_too_and_the_next_one_counts_its_own_steps(tmp_path: Path):
    gc.disable()
    try:
        with run_in(tmp_path / "run") as run:
            run.stage("warmup", 1)
            trainer = OfWarmup()
            left = weakref.ref(trainer)
            run.record(1, {})
            del trainer
            run.stage("rl", 3)
            assert left() is None
            run.record(2, {})
            assert gc.get_freeze_count() == 0, "its second step may compile"
    finally:
        gc.enable()


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


class OnGpu:
    """Runs that take this CPU for a GPU. Only they free what lies in cycles."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.trainers: list[weakref.ref[PolicyTrainer]] = []
        self.left: list[int] = []
        """How many trainers were there, each time that the GPU was given back."""
        self.before: list[int] = []
        """How many were there as the next one was made."""
        (home / "rows.jsonl").write_text('{"prompt": "Say a.", "completion": "a"}\n' * 12)

    def run(self, name: str) -> None:
        spec = {
            "recipe": "sft", "model": {"preset": "tiny"},
            "data": {"kind": "file", "path": str(self.home / "rows.jsonl")},
            "train": {"steps": 3, "lr": 1e-3, "batch_size": 2}, "eval": {"examples": 2}, "checkpoint": {"every": 0},
        }  # fmt: skip
        tandem.run(tandem.parse_spec(spec), self.home / name)

    def there(self) -> int:
        return sum(trainer() is not None for trainer in self.trainers)


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_report: None) -> Iterator[OnGpu]:
    seen, made = OnGpu(tmp_path), PolicyTrainer.__init__

    def noted(self: PolicyTrainer, *given: Any, **more: Any) -> None:
        seen.before.append(seen.there())
        made(self, *given, **more)
        seen.trainers.append(weakref.ref(self))

    monkeypatch.setattr(PolicyTrainer, "__init__", noted)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.left.append(seen.there()))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    gc.disable()
    yield seen
    gc.enable()


def test_after_a_run_its_trainer_is_gone_and_the_gpu_given_back(on_gpu: OnGpu):
    on_gpu.run("run")
    assert len(on_gpu.trainers) == 1
    assert on_gpu.left[-1:] == [0]


def test_a_run_that_failed_is_gone_before_the_next_one_begins(on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(logging.getLogger("tandem"), "propagate", False)  # pytest keeps what is logged, errors too
    with monkeypatch.context() as broken:
        broken.setattr(PolicyTrainer, "step", fails)
        with pytest.raises(ValueError, match="planted"):
            on_gpu.run("failed")
    assert on_gpu.left[-1:] == [1], "its error holds it"
    on_gpu.run("next")
    assert on_gpu.before == [0, 0]
