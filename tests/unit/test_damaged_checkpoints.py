"""A damaged checkpoint is never loaded, and no run begins again over one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.errors import CheckpointDamaged, CheckpointError
from tandem.io import sealed_directory
from tandem.runs.checkpoints import Checkpoints

FILES = ("weights.safetensors", "optimizer.safetensors", "trainer.json", "state.json")


def fill(number: int) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        rng = random.Random(number)
        for name in FILES[:3]:
            (directory / name).write_bytes(rng.randbytes(200 + number))

    return write


def shelf(home: Path, *versions: int) -> Checkpoints:
    found = Checkpoints(home)
    for version in versions:
        found.write(version, fill(version), {"stage": "sft", "version": version})
    return found


def truncated(path: Path, rng: random.Random) -> None:
    file = path / rng.choice([*FILES, sealed_directory.NAME])
    os.truncate(file, rng.randrange(file.stat().st_size))


def flipped(path: Path, rng: random.Random) -> None:
    file = path / rng.choice([*FILES, sealed_directory.NAME])
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def deleted(path: Path, rng: random.Random) -> None:
    (path / rng.choice([*FILES, sealed_directory.NAME])).unlink()


def swapped(path: Path, rng: random.Random) -> None:
    """Two files of it, or it with the one before."""
    files = [path / name for name in rng.sample(FILES, 2)]
    pair = files if rng.random() < 0.5 else [path, path.with_name("step-2")]
    between = path.parent / "between"
    pair[0].rename(between)
    pair[1].rename(pair[0])
    between.rename(pair[1])


def stale(path: Path, rng: random.Random) -> None:
    shutil.copy(path.with_name(f"step-{rng.choice((1, 2))}") / sealed_directory.NAME, path / sealed_directory.NAME)


@pytest.mark.parametrize("damage", [truncated, flipped, deleted, swapped, stale])
def test_of_forty_damaged_checkpoints_none_is_loaded_and_each_run_goes_on_from_one_before(
    tmp_path: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    shelf(tmp_path / "whole", 1, 2, 3)
    assert Checkpoints(tmp_path / "whole").newest().version == 3  # pyright: ignore[reportOptionalMemberAccess]
    for seed in range(40):
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        damage(tmp_path / "run" / "checkpoints" / "step-3", random.Random(seed))
        checkpoints = Checkpoints(tmp_path / "run")
        found = checkpoints.newest()
        assert found is not None
        assert found.version < 3
        assert found.state["version"] == found.version
        assert "damaged-step-3" in {path.name for path in checkpoints.directory.iterdir()}
        assert "step-3" in checkpoints.set_aside[0]
        shutil.rmtree(tmp_path / "run")


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(tmp_path: Path) -> None:
    shelf(tmp_path, 1, 2)
    for version in (1, 2):
        flipped(tmp_path / "checkpoints" / f"step-{version}", random.Random(version))
    for _ in range(2):  # nor when it is asked again
        with pytest.raises(CheckpointDamaged, match="no undamaged checkpoint is left"):
            Checkpoints(tmp_path).newest()


@pytest.mark.parametrize("state", [{"format": 7}, {"format": None}], ids=["unknown", "none"])
def test_a_state_of_another_format_is_refused_and_stays_where_it_is(tmp_path: Path, state: dict[str, object]) -> None:
    shelf(tmp_path, 1).write(2, fill(2), {"stage": "sft", **state})
    with pytest.raises(CheckpointError, match=r"format (7|none), and this Tandem reads format 1") as refused:
        Checkpoints(tmp_path).newest()
    assert type(refused.value) is CheckpointError
    assert Checkpoints(tmp_path).versions() == [1, 2]


def test_a_manifest_of_another_format_is_refused_and_stays_where_it_is(tmp_path: Path) -> None:
    path = shelf(tmp_path, 1, 2).path(2) / sealed_directory.NAME
    body = json.loads(path.read_text()) | {"format": 2}
    del body["seal"]
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "seal": seal}, indent=1, sort_keys=True) + "\n")
    with pytest.raises(CheckpointError, match="format 2, and this Tandem reads format 1") as refused:
        Checkpoints(tmp_path).newest()
    assert type(refused.value) is CheckpointError
    assert Checkpoints(tmp_path).versions() == [1, 2]


def test_checkpoints_that_were_removed_are_missed(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).newest() is None
    (tmp_path / "events.jsonl").write_text('{"number": 1, "stage": "checkpoint", "step": 4}\n')
    with pytest.raises(CheckpointDamaged, match="removed"):
        Checkpoints(tmp_path).newest()


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_crash_at_any_call_to_the_disk_leaves_whole_checkpoints_alone(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf(tmp_path, 1)
    real, failed_at = getattr(os, call), 0
    while True:  # the first call fails, then the second, until none does
        failed_at, calls = failed_at + 1, 0

        def once(*arguments: object, last: int = failed_at) -> None:
            nonlocal calls
            calls += 1
            if calls == last:
                raise OSError(errno.ENOSPC, "no space left on device")
            real(*arguments)

        checkpoints = Checkpoints(tmp_path)
        with monkeypatch.context() as patch, contextlib.suppress(OSError):
            patch.setattr(os, call, once)
            checkpoints.write(2, fill(2), {"version": 2})
        newest = checkpoints.newest()
        assert newest is not None
        assert newest.state["version"] == newest.version
        assert not checkpoints.set_aside
        if calls < failed_at:
            break
        if newest.version == 2:
            sealed_directory.remove(newest.path)
    assert failed_at > 1
    assert newest.version == 2


def test_what_is_kept_goes_only_whole_and_what_a_crash_left_is_swept(tmp_path: Path) -> None:
    checkpoints = shelf(tmp_path, 1, 2, 3, 4)
    checkpoints.prune({2, 4})
    assert checkpoints.versions() == [2, 4]
    (checkpoints.directory / ".step-9.77.1.tmp").mkdir()
    checkpoints.sweep()
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["step-2", "step-4"]


def test_what_others_are_not_permitted_to_write_does_not_appear(tmp_path: Path) -> None:
    def refuse() -> None:
        raise PermissionError

    with pytest.raises(PermissionError):
        Checkpoints(tmp_path, permit=refuse).write(1, fill(1), {})
    assert list((tmp_path / "checkpoints").iterdir()) == []
