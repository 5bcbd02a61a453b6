"""Runs and artifacts on a disk that is full for a while: a small tmpfs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import resume, rows, sft, torch_as_it_was, train

from tandem.errors import ArtifactError, CheckpointUnsaved, NoRoom
from tandem.runs.artifacts import ArtifactStore
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.failure_diagnosis import FailureClass, classify_error
from tandem.runs.run_ending import digest_run
from tandem.runs.storage_retry import Limits
from tandem.runs.supervise import Budget, Supervisor, supervise_run
from tandem.spec.load import parse_spec, to_toml

__all__ = ["torch_as_it_was"]
pytestmark = pytest.mark.usefixtures("one_thread", "torch_as_it_was")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=90m", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, *, leave_bytes: int) -> Path:
    with (disk / "filler").open("wb") as filler:  # in small pieces: a run writes there, too
        while free_bytes(disk) > leave_bytes:
            filler.write(bytes(min(2**18, free_bytes(disk))))
            filler.flush()
    return disk / "filler"


def free_bytes(disk: Path) -> int:
    left = os.statvfs(disk)
    return left.f_bavail * left.f_frsize


class Filling:
    """Checkpoints are written as ever; before the fourth the disk becomes full, after `freed_after` failures it has
    room again."""

    def __init__(self, disk: Path, monkeypatch: pytest.MonkeyPatch, *, freed_after: int) -> None:
        self.disk, self.freed_after, self.writes, self.failures = disk, freed_after, 0, 0
        self._write = Checkpoints.write
        monkeypatch.setattr(Checkpoints, "write", lambda *of, **named: self.write(*of, **named))

    def write(self, *of: Any, **named: Any) -> None:
        self.writes += 1
        if self.writes == 4:
            fill(self.disk, leave_bytes=2**20)
        try:
            self._write(*of, **named)
        except Exception:
            self.failures += 1
            if self.failures == self.freed_after:
                self.free()
            raise

    def free(self) -> None:
        (self.disk / "filler").unlink()


def test_on_a_full_disk_training_goes_on_and_saves_again_when_there_is_room(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_disk / "run"
    train(sft(tmp_path), tmp_path / "whole")
    with monkeypatch.context() as patch:
        Filling(small_disk, patch, freed_after=2)
        assert train(sft(tmp_path, max_failures=3), run)["state"] == "succeeded"
    stages = [row["stage"] for row in rows(run / "events.jsonl")]
    assert stages.count("checkpoint_failed") == 2
    assert "checkpoint" in stages[stages.index("checkpoint_failed") :]
    assert digest_run(run) == digest_run(tmp_path / "whole")
    assert all(Checkpoints(run).read(version) for version in Checkpoints(run).versions())


def test_on_a_disk_that_stays_full_the_run_ends_and_goes_on_from_what_was_saved_before(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_disk / "run"
    train(sft(tmp_path), tmp_path / "whole")
    with monkeypatch.context() as patch:
        filling = Filling(small_disk, patch, freed_after=1000)
        with pytest.raises(CheckpointUnsaved, match=r"3 saves in a row failed"):
            train(sft(tmp_path, max_failures=3), run)
    assert json.loads((run / "status.json").read_text())["failure"]["rule"] == "disk-full"
    filling.free()
    assert resume(run)["state"] == "succeeded"
    assert digest_run(run) == digest_run(tmp_path / "whole")


def test_a_full_disk_damages_no_artifact_and_takes_it_when_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    store = ArtifactStore(str(small_disk / "store"), limits=Limits(tries=2, backoff_s=0.01))
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(os.urandom(2**22))
    first = store.push("run", source)
    filler = fill(small_disk, leave_bytes=2**21)
    (source / "model.safetensors").write_bytes(os.urandom(2**22))
    with pytest.raises(ArtifactError, match="No space left"):
        store.push("run", source)
    assert store.find("run") == first
    store.fetch("run", tmp_path / "back")
    assert free_bytes(small_disk) >= 2**20  # the part was taken back
    filler.unlink()
    assert store.push("run", source).number == 2


def test_on_a_disk_that_is_full_no_run_begins_and_one_that_is_there_waits_for_room(
    tmp_path: Path, small_disk: Path
) -> None:
    run = small_disk / "run"
    filler = fill(small_disk, leave_bytes=0)
    with pytest.raises(NoRoom, match=r"0\.0 MiB free, and .* MiB to begin a run") as refused:
        train(sft(tmp_path), run)
    assert (classify_error(refused.value).failure_class, classify_error(refused.value).retriable) == ("user", False)
    (tmp_path / "spec.toml").write_text(to_toml(parse_spec(sft(tmp_path))))
    with pytest.raises(NoRoom, match="to begin a run"):
        supervise_run(run, tmp_path / "spec.toml")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]  # nothing is left of what did not begin
    filler.unlink()
    train(sft(tmp_path, steps=2), run)
    (run / "status.json").write_text(json.dumps({"state": "running"}))
    fill(small_disk, leave_bytes=0)
    with pytest.raises(NoRoom, match="to go on with a run") as later:
        resume(run)
    assert classify_error(later.value).row()["rule"] == "disk-full"
    assert classify_error(later.value).retriable


def test_a_run_whose_first_checkpoint_cannot_fit_does_not_begin(tmp_path: Path, small_disk: Path) -> None:
    fill(small_disk, leave_bytes=2**23)
    with pytest.raises(NoRoom, match="to begin a run, one checkpoint included"):
        train(sft(tmp_path), small_disk / "run")
    failure = json.loads((small_disk / "run" / "status.json").read_text())["failure"]
    assert (failure["class"], failure["rule"]) == ("user", "disk-full-at-start")


def test_a_supervisor_goes_on_where_it_cannot_write_and_tells_later(tmp_path: Path, small_disk: Path) -> None:
    run, disk = small_disk / "run", small_disk / "filler"
    run.mkdir()
    (run / "spec.toml").touch()
    fill(small_disk, leave_bytes=0)
    command = [sys.executable, "-c", f"""if 1:
        import os, pathlib, sys
        if (disk := pathlib.Path({str(disk)!r})).exists():
            if os.path.exists({str(tmp_path / "second")!r}):
                disk.unlink()
            pathlib.Path({str(tmp_path / "second")!r}).touch()
            sys.exit(6)
    """]  # fmt: skip
    budgets: dict[FailureClass, Budget] = {"infra_retriable": Budget(5, 0.01, 0.01)}
    assert Supervisor(command, command, run, say=lambda _: None, budgets=budgets).run() == 0
    assert [row["attempt"] for row in rows(run / "attempts.jsonl")] == [1, 2, 3]
