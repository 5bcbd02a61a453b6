"""Traps between two syncs: engines that are not who they were, trainers that are not any more, batches without proof.

Each is planted in the real parts, and noticed at the first sync or batch with it; docs/traps.md says who paid for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trap_rig import NUM_IDS, TOKENIZER, Rig, batch_of, leaving, llama, logprobs, make_engine, make_group

from tandem.engine.server.engine import ExistingServer, ServerEngine
from tandem.errors import EngineLost, LogprobGap, SyncError, TandemError
from tandem.loop import run_loop
from tandem.rollout.store import MemoryStore
from tandem.serve.engine.link_rules import Allowed
from tandem.serve.engine.service import engine_service
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import create_app
from tandem.text.renderer import Renderer
from tandem.types import Group, Metrics, Sampling, Trajectory
from tandem.vllm_worker.weight_sources import open_source

pytestmark = pytest.mark.usefixtures("one_thread")


# --- engines behind a server: who answers there may be another one by now


class Place:
    """An engine's server on a thread, and a new engine on the same port when it is started again."""

    def __init__(self, at: Path) -> None:
        self.at, self.port = at, 0
        self.start()

    def start(self) -> None:
        """With the weights that every engine starts with, as version 0."""
        self.engine = make_engine(llama())
        self.engine.version = 0
        self.listen = Listen(self.at / "server", port=self.port)
        service = engine_service(
            self.engine, open_source, renderer=Renderer(TOKENIZER), model_id="test/tiny", context=96,
            num_ids=NUM_IDS, allowed=Allowed(directories=(self.at,)),
        )  # fmt: skip
        app = create_app(service, token=self.listen.token(), hosts=self.listen.hosts)
        self.server = Server(app, self.listen, tell=lambda _: None)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        until = time.monotonic() + 10
        while not self.server.url:
            assert time.monotonic() < until
            time.sleep(0.005)
        self.port = int(self.server.url.rpartition(":")[2])

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=15)
        assert not self.thread.is_alive()

    def client(self) -> ServerEngine:
        return ServerEngine(ExistingServer(self.server.url, self.listen.token_file, patience_s=5.0), deadline_s=10.0)


@pytest.fixture
def standing(tmp_path: Path) -> Any:
    there = Place(tmp_path)
    yield there
    there.stop()


@pytest.mark.parametrize("retries", [0, 1])
def test_an_engine_that_was_restarted_answers_nothing_with_its_start_weights(
    retries: int, standing: Any, tmp_path: Path
) -> None:
    rig = Rig("disk", tmp_path, engine=standing.client(), retries=retries)

    async def scenario() -> None:
        await rig.begin()
        await rig.serves_the_proven_one()
        boot = standing.engine.boot_id
        await asyncio.to_thread(standing.stop)
        await asyncio.to_thread(standing.start)
        assert standing.engine.boot_id != boot
        with pytest.raises(EngineLost, match="it has restarted"):
            await rig.answer()
        if not retries:
            await rig.refused(EngineLost, "engine: ")
        else:
            rig.step()
            assert (await rig.publish()).attempts <= 2
            await rig.serves_the_proven_one()

    rig.play(scenario)


def test_a_trainer_that_another_one_has_replaced_loads_nothing_any_more(standing: Any, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old = Rig("disk", tmp_path / "old", engine=standing.client(), retries=3)
    new = Rig("disk", tmp_path / "new", engine=standing.client())

    async def scenario() -> None:
        await old.begin()
        await new.begin()
        new.step()
        await new.publish()
        await old.refused(TandemError, "another trainer has attached since")
        await new.serves_the_proven_one()
        new.step()
        await new.publish()
        await new.serves_the_proven_one()
        await old.engine.close()
        old.bridge.close()

    new.play(scenario)


# --- batches


class Puts:
    """A producer with one group."""

    def __init__(self, store: MemoryStore, group: Group) -> None:
        self.store, self.group = store, group

    async def run(self) -> None:
        await self.store.put(await self.store.admit(), self.group)
        await asyncio.Event().wait()

    def drain_metrics(self) -> Metrics:
        return {}


def train_on(group: Group, rig: Rig) -> None:
    """The real loop, for one step."""

    async def scenario() -> None:
        store = MemoryStore(2, take_timeout_s=5.0)

        async def after_step(metrics: Metrics) -> None: ...

        await run_loop(
            trainer=rig.trainer, publisher=rig.publisher, store=store, producers=[Puts(store, group)],
            make_batch=batch_of, groups_per_step=1, last_version=1, after_step=after_step,
        )  # fmt: skip

    rig.play(scenario)


def test_a_batch_with_proof_is_trained_on(tmp_path: Path) -> None:
    rig = Rig("disk", tmp_path)
    train_on(make_group(0, version=0), rig)
    assert rig.trainer.version == 1


@pytest.mark.parametrize(
    ("version", "words"),
    [(99, "tokens of version 99, and nothing proves"), (-1, "a sampled token of no version")],
)
def test_the_loop_refuses_a_batch_without_proof(version: int, words: str, tmp_path: Path) -> None:
    rig = Rig("disk", tmp_path)
    with pytest.raises(SyncError, match=words):
        train_on(make_group(0, version), rig)
    assert rig.trainer.version == 0, "nothing was learned from it"


def test_after_a_resume_the_engine_s_start_weights_prove_nothing(tmp_path: Path) -> None:
    """A resumed trainer's first version is published before anything else; without that, its batches are refused."""
    rig = Rig("disk", tmp_path, version=7)
    with pytest.raises(SyncError, match="tokens of version 0, and nothing proves"):
        rig.publisher.check([make_group(0, version=0)])
    assert rig.play(rig.publish).version == 7


# --- what a canary cannot see: it is greedy, and asked right after a sync


async def sampled(rig: Rig, sampling: Sampling) -> Group:
    answers = [await rig.engine.generate([5, 6, 7], replace(sampling, seed=seed)) for seed in range(4)]
    return [
        Trajectory(
            ids=[5, 6, 7, *answer.ids],
            trained=[False] * 3 + [True] * len(answer.ids),
            logprobs=[0.0] * 3 + answer.logprobs,
            versions=[-1] * 3 + answer.versions,
            reward=float(number),
        )
        for number, answer in enumerate(answers)
    ]


@pytest.mark.parametrize("plant", ["", "raw logprobs", "weights dropped in sleep", "base of an adapter written over"])
def test_the_first_batch_of_an_engine_that_changed_after_its_sync_is_refused(plant: str, tmp_path: Path) -> None:
    mode = "adapter" if "adapter" in plant else "disk"
    rig = Rig(mode, tmp_path, temperature=0.7, max_logprob_gap=0.01)

    async def scenario() -> None:
        await rig.publish()
        await rig.publisher.rest(rig.trainer)
        if "weights" in plant or "adapter" in plant:
            with torch.no_grad():
                for tensor in rig.served.parameters():
                    tensor.zero_()
        await rig.publisher.go_on()
        group = await sampled(rig, Sampling(max_tokens=6, temperature=0.7))
        if plant == "raw logprobs":
            for each in group:
                each.logprobs = [0.0] * 3 + logprobs(rig.module, each.ids[3:], each.ids[:3])
        rig.publisher.check([group])
        if not plant:
            assert rig.trainer.step(batch_of([group], 0))["sync/logprob_gap"] < 1e-5
            return
        with pytest.raises(LogprobGap, match="the engine serves other weights than"):
            rig.trainer.step(batch_of([group], 0))
        assert rig.trainer.version == 0, "nothing was learned from it"

    rig.play(scenario)


# --- after a refusal


@pytest.mark.parametrize("mode", ["disk", "broadcast", "adapter", "adapter_broadcast"])
def test_a_refused_version_is_followed_by_a_good_one_without_a_new_start(mode: str, tmp_path: Path) -> None:
    """And requests that were under way end in the version before."""
    rig = Rig(mode, tmp_path, retries=1)

    async def scenario() -> None:
        await rig.begin()
        engine, boot = rig.engine, rig.engine.boot_id
        under_way = asyncio.create_task(engine.generate([1, 2, 3], Sampling(max_tokens=60)))
        await asyncio.sleep(0.05)
        right = rig.trainer.export
        leaving(rig, lambda tensors: dict(list(tensors.items())[1:]))
        await rig.refused(SyncError)
        assert set((await under_way).versions) == {1}
        await rig.serves_the_proven_one()
        rig.trainer.export = right  # type: ignore[method-assign]
        await rig.recovers()
        assert (engine.boot_id, engine.version) == (boot, 2)

    rig.play(scenario)
