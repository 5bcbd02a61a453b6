"""The orchestrator continues after failures: a refused version, a malformed job, a damaged file, a dead process."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.build import online
from tandem.engine.restartable import RestartableEngine
from tandem.errors import Conflict, EngineError, EngineLost, LogprobGap, SyncError
from tandem.io.request_key import RequestKey
from tandem.online.job_store import ENDED, JobStore, LearningJob
from tandem.online.messages import Publish, Sequence1, Teaching
from tandem.online.orchestrator import Orchestrator
from tandem.online.regression_watch import Regression
from tandem.online.sample_replay import ReplayMemory
from tandem.online.trainer_supervisor import TrainerProcess
from tandem.spec.online import parse_online_spec
from tandem.types import Sampling
from tandem.vllm_worker.weight_sources import open_source

pytestmark = pytest.mark.usefixtures("forked_programs")
SPEC = {
    "model": {"preset": "tiny"},
    "train": {"attempts": 2},
    "gates": {"kl": 50.0, "update_norm": 5.0},
    "max_restarts": 2,
}
TRAINER = (sys.executable, "-m", "tandem.recipes.online_trainer_process")
SAMPLE = Sequence1([5, 6], 1, "1")


class Mortal:
    """The embedded engine, as if it were a process that may die."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.dead = engine, asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        if name in ("generate", "attach", "load", "fingerprints") and self.dead.is_set():
            raise EngineLost("engine: it is gone")
        return getattr(self.engine, name)

    async def lost(self) -> None:
        await self.dead.wait()


class Played:
    """An orchestrator with the engine and the trainer process that a server has, without HTTP."""

    def __init__(self, home: Path, *, mortal: bool = False) -> None:
        spec = parse_online_spec(SPEC)
        self.command, self.log, self.jobs = list(TRAINER), home / "trainer.log", 0
        self.versions = home / "versions"
        alone = online.alone(spec, home)
        self.engine: Any = alone.engine
        self.lives: list[Mortal] = []

        def another(*_: Any) -> Mortal:
            self.lives.append(Mortal(online.alone(spec, home).engine))
            return self.lives[-1]

        if mortal:
            self.engine = RestartableEngine(another(), another)
        self.store = JobStore(home / "jobs")
        self.orchestrator = Orchestrator(
            spec,
            self.store,
            self.engine,
            open_source,
            lambda: TrainerProcess(self.command, self.log, {"OMP_NUM_THREADS": "1"}),
            self.versions,
            ReplayMemory(spec.replay, spec.seed, self.store, spec.train.batch_size),
            online.ordinary(spec, alone, home),
            self.engine.start_again if mortal else None,
        )

    async def teach(self, sample: Sequence1 = SAMPLE, steps: int = 1) -> str:
        self.jobs += 1
        teaching, once = Teaching("sft", 1e-4, steps, "full", 0), RequestKey(f"job-{self.jobs}", b"")
        told = await self.store.add([[sample]], teaching, who="me", source="", said=b"[]", once=once)
        self.orchestrator.wake()
        return told["id"]

    async def until(self, id: str, *states: str) -> LearningJob:
        async with asyncio.timeout(60):
            while (job := self.store.job(id)).state not in states:
                await asyncio.sleep(0.01)
        return job


def test_the_orchestrator_goes_on_over_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        played = Played(tmp_path)
        await played.orchestrator.start()
        try:
            await a_version_that_the_engine_refuses_is_not_served(played, monkeypatch)
            await an_activation_that_the_engine_refuses_is_taken_back(played, monkeypatch)
            await a_context_that_leaves_no_room_for_an_answer_is_learned(played)
            await a_malformed_job_fails_alone(played)
            await a_malformed_request_gets_an_error(played)
            await a_version_that_is_damaged_is_not_activated(played)
            await a_job_is_cancelled_while_the_trainer_is_dead(played)
            await a_job_is_cancelled_when_its_version_is_written(played, monkeypatch)
            await a_job_is_interrupted_by_an_activation_and_restarted(played)
            await a_job_that_is_just_starting_is_interrupted_as_well(played, monkeypatch)
            await versions_on_top_of_a_regressed_one_are_rolled_back_too(played)
            await a_trainer_process_that_hangs_is_restarted(played)
            await a_checkpoint_that_cannot_be_written_ends_nothing(played, monkeypatch)
            await requests_are_refused_once_the_loop_has_stopped(played)
        finally:
            await played.orchestrator.close()

    asyncio.run(run())


def test_a_rollback_to_other_weights_than_were_served_before_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def run() -> None:
        played = Played(tmp_path)
        await played.orchestrator.start()
        try:
            await played.until(await played.teach(), *ENDED)
            assert played.orchestrator.serving == 1
            call = played.orchestrator.trainer.call

            async def lies(what: Any, *args: Any) -> dict[str, Any]:
                told = await call(what, *args)
                return told | {"digest": "another"} if isinstance(what, Publish) and not what.version else told

            monkeypatch.setattr(played.orchestrator.trainer, "call", lies)
            with pytest.raises(SyncError, match="version 0 is served with digest another"):
                await played.orchestrator.activate(0, "me")
            assert played.orchestrator.serving == played.store.active == 1
        finally:
            await played.orchestrator.close()

    asyncio.run(run())


def test_an_engine_that_dies_is_restarted_and_no_job_fails(tmp_path: Path):
    async def run() -> None:
        played = Played(tmp_path, mortal=True)
        await played.orchestrator.start()
        try:
            first = await played.until(await played.teach(), *ENDED)
            before, pid = await played.engine.fingerprints(), played.orchestrator.status()["trainer"]["pid"]
            for lives, steps in ((1, 1), (2, 30)):  # when nothing is trained, and in the middle of a job
                taught = await played.teach(steps=30) if steps > 1 else ""
                if taught:
                    await played.until(taught, "running")
                played.lives[-1].dead.set()
                async with asyncio.timeout(20):
                    while not played.orchestrator.why_unfit():
                        await asyncio.sleep(0.001)
                assert "the engine was lost" in played.orchestrator.why_unfit()
                with pytest.raises(EngineLost):
                    await played.engine.generate([5, 6], Sampling(max_tokens=1))
                taught = taught or await played.teach()
                job = await played.until(taught, *ENDED)
                assert (job.state, job.attempt, job.why) == ("published", 1, "")
                assert len(played.lives) == 1 + lives
                assert played.orchestrator.status()["engine"] == {"alive": True, "restarts": lives, "why": ""}
            assert played.orchestrator.status()["trainer"]["pid"] == pid
            assert played.orchestrator.status()["trainer"]["restarts"] == 0
            await asyncio.wait_for(played.orchestrator.activate(first.version or 0, "me"), 20)
            assert await played.engine.fingerprints() == before
        finally:
            await played.orchestrator.close()

    asyncio.run(run())


def test_a_lesson_whose_version_was_damaged_before_it_was_served_is_not_said_to_be_learned(tmp_path: Path):
    """Killed between the commit and the publication, and then the disk."""

    async def taught() -> str:
        played = Played(tmp_path)
        await played.orchestrator.start()
        try:
            job = await played.until(await played.teach(), *ENDED)
        finally:
            await played.orchestrator.close()
        assert (job.state, job.version) == ("published", 1)
        return job.id

    async def started_again(id: str) -> None:
        played = Played(tmp_path)
        await played.orchestrator.start()
        try:
            job = played.store.job(id)
            assert (job.state, "its version 1 is damaged" in job.why) == ("failed", True)
            assert (played.store.active, played.store.version(1)["state"]) == (0, "damaged")
            assert (await played.until(await played.teach(), *ENDED)).parent == 0
        finally:
            await played.orchestrator.close()

    id = asyncio.run(taught())
    with closing(sqlite3.connect(tmp_path / "jobs" / "index.sqlite3")) as index, index:
        index.execute("UPDATE jobs SET state = 'publishing' WHERE id = ?", (id,))
    for path in (tmp_path / "versions").glob("[au]*000001*"):
        largest = max(path.iterdir(), key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-1])
    asyncio.run(started_again(id))


def test_after_a_rollback_the_optimizer_is_that_of_the_checkpoint_behind_as_after_a_restart(tmp_path: Path):
    async def taught(home: Path, *, killed: bool) -> Any:
        played = Played(home)
        await played.orchestrator.start()
        try:
            await played.until(await played.teach(), *ENDED)
            await played.orchestrator.checkpoint()
            for _ in range(2):
                await played.until(await played.teach(), *ENDED)
            await played.orchestrator.activate(1, "me")
            if killed:
                os.kill(played.orchestrator.status()["trainer"]["pid"], signal.SIGKILL)
            job = await played.until(await played.teach(), *ENDED)
            assert (job.state, job.parent) == ("published", 1)
            return await played.engine.fingerprints()
        finally:
            await played.orchestrator.close()

    there = [asyncio.run(taught(tmp_path / f"{killed}", killed=killed)) for killed in (False, True)]
    assert there[0] == there[1]


async def a_version_that_the_engine_refuses_is_not_served(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary is asked when the engine has flipped already."""
    before = await played.engine.fingerprints()
    with canary_fails(played, monkeypatch, but_for=0) as flipped:
        job = await played.until(await played.teach(), *ENDED)
    assert (job.state, "nats a token about a fixed prompt" in job.why) == ("failed", True)
    assert flipped == [1]
    async with asyncio.timeout(60):
        while played.engine.version:
            await asyncio.sleep(0.01)
    assert await played.engine.fingerprints() == before
    assert (await played.until(await played.teach(), *ENDED)).parent == 0


async def an_activation_that_the_engine_refuses_is_taken_back(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    active, before = played.store.active, await played.engine.fingerprints()
    assert active
    with canary_fails(played, monkeypatch, but_for=active) as flipped, pytest.raises(LogprobGap, match="fixed prompt"):
        await asyncio.wait_for(played.orchestrator.activate(0, "me"), 30)
    assert flipped == [0]
    assert (played.store.active, played.orchestrator.serving) == (active, active)
    assert await played.engine.fingerprints() == before
    assert (await played.until(await played.teach(), *ENDED)).parent == active


async def a_version_that_is_damaged_is_not_activated(played: Played) -> None:
    for _ in range(2):
        active = (await played.until(await played.teach(), *ENDED)).version
    assert active
    leading = [path for path in played.versions.glob(f"[au]*{active - 1:06d}*") if path.is_dir()]
    assert {path.name.partition("-")[0] for path in leading} == {"anchor", "update"}  # every way there
    weights = {"anchor": "weights.safetensors", "update": "update.safetensors"}
    files = [path / weights[path.name.partition("-")[0]] for path in leading]
    whole = [file.read_bytes() for file in files]
    for file, kept in zip(files, whole, strict=True):
        file.write_bytes(kept[:-1])
    before = f"version {active - 1}"
    with pytest.raises(Conflict, match=f"{before} is damaged"):
        await asyncio.wait_for(played.orchestrator.activate(active - 1, "me"), 30)
    for file, kept in zip(files, whole, strict=True):
        file.write_bytes(kept)
    assert played.store.version(active - 1)["state"] == "damaged"
    assert (await played.until(await played.teach(), *ENDED)).parent == active


@contextmanager
def canary_fails(played: Played, monkeypatch: pytest.MonkeyPatch, *, but_for: int) -> Iterator[list[int]]:
    """In any version but one; yields those that failed."""
    generate, flipped = played.engine.generate, list[int]()

    async def odd(prompt: Any, sampling: Any, **options: Any) -> Any:
        told = await generate(prompt, sampling, **options)
        if sampling.temperature or played.engine.version == but_for:
            return told
        flipped.append(played.engine.version)
        return replace(told, logprobs=[each - 5 for each in told.logprobs])

    with monkeypatch.context() as patched:
        patched.setattr(played.engine, "generate", odd)
        yield flipped


async def a_context_that_leaves_no_room_for_an_answer_is_learned(played: Played) -> None:
    whole = Sequence1([5] * 2048, 2047, "1")
    job = await played.until(await played.teach(whole), *ENDED)
    assert (job.state, job.attempt, job.why) == ("published", 1, "")


async def a_malformed_job_fails_alone(played: Played) -> None:
    job = await played.until(await played.teach(Sequence1(SAMPLE.ids, SAMPLE.first, SAMPLE.trained, math.nan)), *ENDED)
    assert (job.state, job.attempt) == ("failed", 2)
    assert "ValidationError" in job.why
    assert (await played.until(await played.teach(), *ENDED)).state == "published"


async def a_malformed_request_gets_an_error(played: Played) -> None:
    with pytest.raises(OverflowError):
        await asyncio.wait_for(played.orchestrator.activate(10**30, "me"), 20)
    assert (await asyncio.wait_for(played.orchestrator.activate(0, "me"), 20))["version"] == 0


async def a_job_is_cancelled_when_its_version_is_written(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel between the trainer's last check and the commit; the next job trains on from the same parent."""
    active, before, commit = played.store.active, await played.engine.fingerprints(), played.store.commit

    async def called_off(job: LearningJob, *what: Any) -> bool:
        assert (await played.store.cancel(job.id, "me")) == "running"
        return await commit(job, *what)

    with monkeypatch.context() as patched:
        patched.setattr(played.store, "commit", called_off)
        job = await played.until(await played.teach(), *ENDED)
    assert (job.state, job.why) == ("cancelled", "it was cancelled")
    assert (played.store.active, played.orchestrator.serving) == (active, active)
    assert await played.engine.fingerprints() == before
    later = await played.until(await played.teach(), *ENDED)
    assert (later.state, later.parent) == ("published", active)


async def a_job_is_cancelled_while_the_trainer_is_dead(played: Played) -> None:
    long = await played.teach(steps=1000)
    await played.until(long, "running")
    os.kill(played.orchestrator.status()["trainer"]["pid"], 9)
    while played.orchestrator.status()["trainer"]["alive"]:
        await asyncio.sleep(0.001)
    assert (await played.orchestrator.cancel(long, "me"))["state"] == "cancelling"
    job = await played.until(long, *ENDED)
    assert (job.state, job.why, job.attempt) == ("cancelled", "it was cancelled", 1)
    assert played.orchestrator.status()["job"] is None


async def a_job_is_interrupted_by_an_activation_and_restarted(played: Played) -> None:
    first = await played.until(await played.teach(), *ENDED)
    long = await played.teach(steps=1000)
    await played.until(long, "running")
    await asyncio.sleep(0.2)
    assert (await asyncio.wait_for(played.orchestrator.activate(0, "me"), 20))["version"] == 0
    assert played.orchestrator.serving == 0 != first.version
    again = await played.until(long, "running")
    assert (again.parent, again.attempt) == (0, 1)
    await played.orchestrator.cancel(long, "me")
    assert (await played.until(long, *ENDED)).state == "cancelled"


async def a_job_that_is_just_starting_is_interrupted_as_well(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activate while the store is starting the job."""
    begin, requests = played.store.begin, list[asyncio.Task[Any]]()
    assert (await played.until(await played.teach(), *ENDED)).state == "published"

    async def begun(id: str) -> LearningJob:
        if not requests:
            requests.append(asyncio.create_task(played.orchestrator.activate(0, "me")))
            await asyncio.sleep(0.05)
        return await begin(id)

    with monkeypatch.context() as patched:
        patched.setattr(played.store, "begin", begun)
        long = await played.teach(steps=1000)
        await played.until(long, "running")
        assert (await asyncio.wait_for(requests[0], 5))["version"] == 0
    assert (await played.until(long, "running")).parent == 0
    await played.orchestrator.cancel(long, "me")
    await played.until(long, *ENDED)


async def versions_on_top_of_a_regressed_one_are_rolled_back_too(played: Played) -> None:
    """A second version was published before the rollback of the first."""
    first = await played.until(await played.teach(), *ENDED)
    second = await played.until(await played.teach(), *ENDED)
    assert (second.parent, played.store.active) == (first.version, second.version)
    fall = Regression(first.version or 0, 1.0, 0.0, 4, "it fell")
    await played.orchestrator.roll_back(fall, first.parent or 0)
    assert played.store.active == played.orchestrator.serving == first.parent
    assert played.store.audit(1)[0]["who"] == "watch"
    await played.orchestrator.roll_back(fall, first.parent or 0)
    assert played.store.active == first.parent, "it is not an ancestor of the active version any more"


async def a_trainer_process_that_hangs_is_restarted(played: Played) -> None:
    trainer = played.orchestrator.trainer
    before_s, trainer.deadline_s = trainer.deadline_s, 2.0
    long = await played.teach(steps=30)
    await played.until(long, "running")
    before = played.orchestrator.status()["trainer"]["pid"]
    os.kill(before, signal.SIGSTOP)
    job = await played.until(long, *ENDED)
    assert (job.state, job.attempt) == ("published", 2)
    assert played.orchestrator.status()["trainer"]["pid"] != before
    trainer.deadline_s = before_s


async def a_checkpoint_that_cannot_be_written_ends_nothing(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory cannot be written once a job has ended; the timer's checkpoint fails, and the server goes on."""
    versions, end = played.versions, played.store.end

    async def nowhere_to_write(id: str, state: str, *why: str) -> None:
        await end(id, state, *why)
        versions.rename(versions.with_name("elsewhere"))
        versions.write_text("not a directory")

    with monkeypatch.context() as patched:
        due = lambda: not played.orchestrator.status()["why_no_checkpoint"]  # noqa: E731
        patched.setattr(played.orchestrator, "checkpoint_due", due)
        patched.setattr(played.store, "end", nowhere_to_write)
        assert (await played.until(await played.teach(), *ENDED)).state == "published"
        pid = played.orchestrator.status()["trainer"]["pid"]
        async with asyncio.timeout(20):
            while not (why := played.orchestrator.status()["why_no_checkpoint"]):
                await asyncio.sleep(0.01)
    versions.unlink()
    versions.with_name("elsewhere").rename(versions)
    assert str(versions) in why
    assert played.orchestrator.status()["trainer"]["pid"] == pid
    await played.orchestrator.checkpoint()
    assert played.orchestrator.status()["why_no_checkpoint"] == ""


async def requests_are_refused_once_the_loop_has_stopped(played: Played) -> None:
    await played.until(await played.teach(), *ENDED)
    played.command = ["false"]
    os.kill(played.orchestrator.status()["trainer"]["pid"], 9)
    with pytest.raises(EngineError, match=r"restart the server.*max_restarts = 2"):
        await asyncio.wait_for(played.orchestrator.checkpoint(), 60)
    with pytest.raises(EngineError, match="restart the server"):
        await asyncio.wait_for(played.orchestrator.checkpoint(), 20)
    assert "ended" in played.orchestrator.why_unfit()
