"""Files that something else wrote over: of any kind, size and depth, none ends in a traceback or is waited for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.errors import TandemError
from tandem.io import sealed_directory
from tandem.io.jsonl import read_jsonl
from tandem.obs.rollouts_status import rollouts_status
from tandem.obs.run_history import read_status
from tandem.obs.sync_status import sync_status
from tandem.rollout.sessions.tree import link
from tandem.runs.artifacts import ArtifactStore
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.eval_files import read_evals
from tandem.runs.lease import DirectoryLease
from tandem.runs.liveness import read_sign
from tandem.runs.run_ending import finished
from tandem.runs.sweep import read_seed
from tandem.runs.watch import look

DEEP = "[" * 200_000


def deep(path: Path) -> None:
    path.write_text(DEEP + "\n")


def deep_objects(path: Path) -> None:
    path.write_text('{"a":' * 900 + "1" + "}" * 900 + "\n")


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, 2**40)  # of holes: it takes no room, and no memory holds it


HOSTILE = [deep, deep_objects, pipe, folder, endless]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_manifest_of_any_kind_gives_way_to_the_checkpoint_before(tmp_path: Path, hostile: Callable[[Path], None]):
    checkpoints = Checkpoints(tmp_path)
    for version in (1, 2):
        checkpoints.write(version, lambda directory: (directory / "weights").touch(), {"stage": "rl"})
    hostile(checkpoints.path(2) / sealed_directory.NAME)
    found = Checkpoints(tmp_path).newest()
    assert found is not None
    assert found.version == 1


READERS: dict[str, Callable[[Path], object]] = {
    "status.json": read_status,
    "status.json of a run that ended": finished,
    "status.json of a sweep": lambda run: read_seed(run, 0),
    "epoch.json": DirectoryLease,
    "progress.json": read_sign,
    "evals/step-1.json": read_evals,
    "sync-map.json": lambda run: sync_status(str(run)),
    "ready.json": lambda run: rollouts_status(str(run)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("file", READERS)
def test_a_file_beside_a_run_of_any_kind_is_left_out_or_an_error_of_ours(
    tmp_path: Path, file: str, hostile: Callable[[Path], None]
):
    path = tmp_path / file.partition(" ")[0]
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "spec.toml").touch()
    hostile(path)
    with contextlib.suppress(TandemError):
        READERS[file](tmp_path)


def test_a_line_that_nests_too_deep_is_damage_like_any_other(tmp_path: Path):
    for name in ("metrics.jsonl", "events.jsonl"):
        deep(tmp_path / name)
    with pytest.raises(TandemError, match="nests too deep"):
        read_jsonl(tmp_path / "metrics.jsonl")
    (tmp_path / "spec.toml").touch()
    assert (look(tmp_path)["metrics"], look(tmp_path)["events"]) == ({}, [])


def test_an_artifact_whose_manifest_nests_too_deep_hides_itself_and_not_the_one_before(tmp_path: Path):
    store, source = ArtifactStore(str(tmp_path / "store")), tmp_path / "file"
    for content in ("first", "second"):
        source.write_text(content)
        store.push("run", source)
    deep(max((tmp_path / "store" / "run" / "manifests").iterdir()))
    store.fetch("run", tmp_path / "back")
    assert (tmp_path / "back" / "file").read_text() == "first"


@pytest.mark.parametrize("depth", [150, 500, 700, 950, 200_000])
def test_arguments_of_a_call_that_nest_too_deep_are_a_text(depth: int):
    call = {"function": {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}}
    assert link(b"", {"role": "assistant", "tool_calls": [call]})
