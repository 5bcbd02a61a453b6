"""What is replayed from a real job store: only samples that the active version was trained on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from tandem.io.request_key import RequestKey
from tandem.online.job_store import JobStore, LearningJob
from tandem.online.messages import Sequence1, Teaching
from tandem.online.sample_replay import ReplayMemory
from tandem.spec.online_gates import ReplaySpec

SPEC = ReplaySpec(share=0.5, per_source=1.0)


def sample(number: int) -> list[list[Sequence1]]:
    return [[Sequence1([number, number + 1], 1, "1")]]


async def publish(store: JobStore, number: int, memory: ReplayMemory | None = None) -> LearningJob:
    teaching = Teaching("sft", 1e-3, 10, "full", 0)
    once = RequestKey(f"key {number} {len(store.jobs(99))}", b"")
    told = await store.add(sample(number), teaching, who="me", source="s", said=b"[]", once=once)
    job = await store.begin(told["id"])
    await store.commit(job, "digest", 1, {})
    await store.end(job.id, "published")
    if memory is not None:
        memory.remember(job, store.groups(job.id))
    return store.job(job.id)


def replayed(memory: ReplayMemory, store: JobStore) -> list[int]:
    job = replace(store.jobs(1)[0], parent=store.active, number=1)
    drawn, _ = memory.draw(job, sample(999))
    return sorted({group[0].ids[0] for group in drawn})


def test_what_was_taken_back_is_not_taught_again(tmp_path: Path):
    """0 - 1 - 2 - 3, back to 1, then 4; 10 is taught in 1, 20 in 2, 30 in 3, 40 in 4, and 20 again in 5."""

    async def work(store: JobStore) -> None:
        await store.first(0, "digest")
        memory = ReplayMemory(SPEC, 0, store, batch_size=8)
        for number in (10, 20, 30):
            await publish(store, number, memory)
        assert store.lineage(3) == {0, 1, 2, 3}
        assert replayed(memory, store) == [10, 20, 30]
        await store.activate(1, "me", "it was bad")
        assert replayed(memory, store) == [10]
        await publish(store, 40, memory)
        assert store.lineage(4) == {0, 1, 4}
        assert replayed(memory, store) == [10, 40]
        assert replayed(ReplayMemory(SPEC, 0, store, batch_size=8), store) == [10, 40], "after a restart too"
        await publish(store, 20, memory)
        assert replayed(memory, store) == [10, 20, 40], "somebody taught it again"
        await store.activate(3, "me", "it was good after all")
        assert replayed(memory, store) == [10, 20, 30]

    async def run() -> None:
        store = JobStore(tmp_path)
        try:
            await work(store)
        finally:
            store.close()

    asyncio.run(run())
