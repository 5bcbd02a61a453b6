"""What holds prompts, answers, rewards, weights and keys is for one user of the machine, whatever the umask."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from queue_rig import Rig, rigged

from privacy import readable_by_others
from tandem.io import atomic_write
from tandem.io.jsonl import append_jsonl
from tandem.online.job_store import JobStore
from tandem.online.trainer_supervisor import TrainerProcess
from tandem.rollout.sessions.store import SessionStore
from tandem.rollout.sessions.tree import Session
from tandem.runs.artifacts import ArtifactStore
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.lease import DirectoryLease, begin
from tandem.serve.http.run import Listen
from tandem.serve.online.keys import Keys


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory that others may enter and read, and the usual umask."""
    before = os.umask(0o022)
    place = tmp_path / "shared"
    place.mkdir()
    yield place
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_service_s_files_are_private_even_in_a_directory_that_was_there(shared: Path):
    async def scenario(rig: Rig) -> None:
        await rig.begin()
        await rig.put("a prompt")
        await rig.take(1)
        assert {path.name for path in shared.iterdir()} >= {"index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm"}
        assert readable_by_others(shared) == []

    rigged(shared, scenario)
    Keys.of(shared, Listen(shared).token())
    sessions, jobs = SessionStore(shared / "sessions"), JobStore(shared / "jobs")
    sessions.opened(Session("id", False, "", 0, "", 0.0, 0.0))
    asyncio.run(jobs.first(0, "digest"))
    trainer = TrainerProcess(["echo"], shared / "trainer.log", {})
    trainer.socket.close()
    trainer.stop(5.0)
    assert readable_by_others(shared) == []
    sessions.close()
    jobs.close()
    assert readable_by_others(shared) == []


def test_an_index_that_an_earlier_release_left_to_the_umask_is_closed(shared: Path):
    home = shared / "sessions"
    home.mkdir()
    SessionStore(home).close()
    for name in ("index.sqlite3", "owner.lock"):
        (home / name).chmod(0o644)
    store = SessionStore(home)
    assert "index.sqlite3" not in readable_by_others(home)
    store.close()


def test_a_data_directory_that_a_service_makes_is_closed_and_those_above_it_are_not(shared: Path):
    Listen(shared / "deep" / "data").token()
    assert (mode_of(shared / "deep"), mode_of(shared / "deep" / "data")) == (0o755, 0o700)
    SessionStore(shared / "another" / "sessions").close()
    assert (mode_of(shared / "another"), mode_of(shared / "another" / "sessions")) == (0o755, 0o700)


def test_a_run_s_directory_decides_and_what_is_in_it_follows_the_umask(shared: Path):
    """So that its owner can open it to a group by one command (docs/runs.md)."""
    run = shared / "runs" / "run"
    begin(run, "recipe = 'rl'")
    DirectoryLease(run).close()
    append_jsonl(run / "samples.jsonl", {"text": "an answer"})
    Checkpoints(run).write(1, lambda directory: (directory / "weights").touch(), {})
    assert readable_by_others(shared) == []
    assert mode_of(run) == 0o700
    assert mode_of(run / "samples.jsonl") == 0o644
    run.chmod(0o750)
    assert "samples.jsonl" in readable_by_others(run)


def test_an_artifact_store_that_is_made_is_private_and_one_that_is_there_stays_as_it_is(shared: Path):
    source = shared.parent / "file"
    source.write_text("weights")
    ArtifactStore(str(shared / "mine")).push("run", source)
    assert readable_by_others(shared) == []
    (shared / "ours").mkdir()
    ArtifactStore(str(shared / "ours")).push("run", source)
    assert len([path for path in readable_by_others(shared) if path.startswith("ours/run/")]) == 2


def test_a_directory_that_is_a_file_is_refused(shared: Path):
    (shared / "file").touch()
    for path in (shared / "file", shared / "file" / "below"):
        with pytest.raises(NotADirectoryError):
            atomic_write.make_directory(path)
