"""The job store: one commit point, numbers that are never given twice, answers that are remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import Conflict, KeyReused, NotKnown, QueueFull
from tandem.io.request_key import RequestKey
from tandem.online.job_store import JobStore
from tandem.online.messages import Sequence1, Teaching

TEACHING = Teaching("sft", 1e-3, 2, "full", 0)
GROUPS = [[Sequence1([1, 2, 3], 2, "1")]]


def play(directory: Path, work: Callable[[JobStore], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        store = JobStore(directory, **options)
        try:
            return await work(store)
        finally:
            store.close()

    return asyncio.run(run())


async def add(store: JobStore, key: str, body: bytes = b"body") -> str:
    once = RequestKey(key, body)
    return (await store.add(GROUPS, TEACHING, who="me", source="s", said=b'["x"]', once=once))["id"]


def test_a_key_gives_the_same_job_across_a_restart_and_refuses_another_body(tmp_path: Path):
    async def first(store: JobStore) -> str:
        return await add(store, "k")

    async def second(store: JobStore) -> tuple[str, int]:
        again = await add(store, "k")
        with pytest.raises(KeyReused):
            await add(store, "k", b"other")
        return again, len(store.jobs(10))

    job = play(tmp_path, first)
    assert play(tmp_path, second) == (job, 1)


def test_nothing_shows_before_the_commit_and_everything_after_it(tmp_path: Path):
    async def work(store: JobStore) -> None:
        await store.first(0, "d0")
        job = await store.begin(await add(store, "a"))
        assert (job.version, job.parent, store.active, store.usable()) == (1, 0, 0, [0])
        await store.requeue(job.id, "it died")
        job = await store.begin(job.id)
        assert (job.version, job.attempt) == (2, 2), "the number of the lost attempt is used up"
        await store.commit(job, "d2", 10, {"outcome": "passed"})
        assert (store.active, store.usable(), store.job(job.id).state) == (2, [0, 2], "publishing")
        await store.end(job.id, "published")
        assert store.job(job.id).row()["outcome"] == "passed"
        assert store.groups(job.id) == GROUPS
        assert store.said(job.id) == ["x"]

    play(tmp_path, work)


def test_a_version_that_the_engine_refused_is_taken_back_and_never_served(tmp_path: Path):
    async def work(store: JobStore) -> None:
        await store.first(0, "d0")
        job = await store.begin(await add(store, "a"))
        await store.commit(job, "d1", 10, {})
        await store.refused(job, "a digest differs")
        assert (store.active, store.usable(), store.job(job.id).state) == (0, [0], "failed")
        with pytest.raises(Conflict, match="dropped"):
            await store.activate(1, "me", "")
        with pytest.raises(NotKnown):
            await store.activate(7, "me", "")
        assert (await store.begin(await add(store, "b"))).version == 2

    play(tmp_path, work)


def test_only_a_waiting_job_is_cancelled_and_the_queue_has_an_end(tmp_path: Path):
    async def work(store: JobStore) -> None:
        await store.first(0, "d0")
        one, two = await add(store, "a"), await add(store, "b")
        with pytest.raises(QueueFull):
            await add(store, "c")
        assert await store.cancel(two, "me") == "cancelled"
        with pytest.raises(Conflict):
            await store.begin(two)
        await store.begin(one)
        assert await store.cancel(one, "me") == "running"
        assert store.count() == {"cancelled": 1, "running": 1}
        assert [row["what"] for row in store.audit(10)] == ["cancelling", "cancelled", "train", "train", "first"]
        await store.requeue(one, "it died")
        assert store.job(one).state == "cancelled", "said before the server died, too"

    play(tmp_path, work, max_queued=2)
