"""Runs and artifacts on a disk that is full for a while: a small tmpfs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_runs import resume, sft, torch_as_it_was, train

from tandem.errors import ArtifactError, CheckpointUnsaved
from tandem.runs.artifacts import ArtifactStore
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.resume import digest_run
from tandem.runs.retry import Limits

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
            filler.write(bytes(2**18))
            filler.flush()
    return disk / "filler"


def free_bytes(disk: Path) -> int:
    left = os.statvfs(disk)
    return left.f_bavail * left.f_frsize


def when(seen: Callable[[], bool], do: Callable[[], object]) -> threading.Thread:
    def wait() -> None:
        until = time.monotonic() + 60
        while not seen() and time.monotonic() < until:
            time.sleep(0.005)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def stages(run: Path, stage: str) -> int:
    """Whole rows or not: the file is being written."""
    return (run / "events.jsonl").read_text().count(f'"stage": "{stage}"') if (run / "events.jsonl").exists() else 0


def test_on_a_full_disk_training_goes_on_and_saves_again_when_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    run = small_disk / "run"
    train(sft(tmp_path, steps=20), tmp_path / "whole")
    filled = when(lambda: stages(run, "checkpoint") >= 3, lambda: fill(small_disk, leave_bytes=2**20))
    freed = when(lambda: stages(run, "checkpoint_failed") >= 2, lambda: (small_disk / "filler").unlink())
    assert train(sft(tmp_path, steps=20, max_failures=1000), run)["state"] == "succeeded"
    filled.join()
    freed.join()
    assert stages(run, "checkpoint_failed") >= 2
    assert digest_run(run) == digest_run(tmp_path / "whole")
    assert all(Checkpoints(run).read(version) for version in Checkpoints(run).versions())
    # For too long: the run ends, and goes on from what was saved before.
    shutil.rmtree(run)
    filled = when(lambda: stages(run, "checkpoint") >= 3, lambda: fill(small_disk, leave_bytes=2**20))
    with pytest.raises(CheckpointUnsaved, match=r"3 saves in a row failed"):
        train(sft(tmp_path, steps=20, max_failures=3), run)
    filled.join()
    assert json.loads((run / "status.json").read_text())["failure"]["rule"] == "disk-full"
    (small_disk / "filler").unlink()
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
