"""A real vLLM server as an Engine, with every bridge that a CPU allows: published with proof, and sampled from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_cpu import PYTHON, adapted, changed, full, gap, small_model

from tandem.bridge.collective.sender import AdapterBroadcastBridge, BroadcastBridge
from tandem.bridge.collective.shared_buffers import BufferWriter
from tandem.bridge.files.adapter import AdapterBridge
from tandem.bridge.files.checkpoint import DiskBridge
from tandem.engine.vllm.engine import VllmEngine
from tandem.engine.vllm.options import VllmOptions
from tandem.engine.vllm.process import VllmProcess
from tandem.errors import SyncError
from tandem.model import served_weights
from tandem.types import Completion, Sampling, Sent, Served, Weights

PROMPT = [5, 17, 33, 90, 121, 7, 64]
GREEDY = Sampling(max_tokens=8, temperature=0.0)
NEAR, FAR = 0.001, 0.05  # float32


class Rig:
    """A server and an event loop to talk to it from."""

    def __init__(
        self, path: Path, module: Any, tensor_parallel: int = 1, images: Any = None, num_ids: int = 200
    ) -> None:
        """`images`: of a model that sees."""
        self.path, self.module, self.version = path, module, 0
        self.loop = asyncio.new_event_loop()
        options = VllmOptions(
            str(path),
            str(PYTHON),
            dtype="float32",
            device="cpu",
            tensor_parallel=tensor_parallel,
            max_running=16,
            max_context=128,
            eager=True,
            adapter_slots=2,
            max_rank=8,
            sleeps=True,
            further=[] if images is not None else ["--skip-tokenizer-init"],
            environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
        )
        process = VllmProcess(options, path)
        process.wait_ready(300)
        self.engine = VllmEngine(process, end_ids=frozenset(), num_ids=num_ids, images=images)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.engine.close())
        self.loop.close()

    def bridge(self, mode: str) -> Any:
        buffers = [name for name, _ in self.module.named_buffers()]
        made: Any = {
            "disk": lambda: DiskBridge(self.path / "versions", self.path, buffers=buffers, deadline_s=20),
            "broadcast": lambda: BroadcastBridge("cpu", deadline_s=20),
            "adapter": lambda: AdapterBridge(deadline_s=20),
            "adapter_broadcast": lambda: AdapterBroadcastBridge("cpu", deadline_s=20),
            "adapter_broadcast by memory": lambda: AdapterBroadcastBridge("cpu", deadline_s=20, backend="ipc"),
        }[mode]()
        self.run(self.engine.attach(made.source(self.engine.receivers)))
        return made

    def publish(self, bridge: Any, trained: Any) -> tuple[Sent, Served]:
        self.version += 1
        if bridge.carries == "adapter":
            config = served_weights.adapter_config(trained)
            weights = Weights(self.version, "adapter", lambda: served_weights.adapter(trained.base_model.model), config)
        else:
            weights = full(trained, self.version)

        async def both() -> tuple[Sent, Served]:
            return await asyncio.gather(asyncio.to_thread(bridge.send, weights), self.engine.load(self.version))

        return self.run(both())

    def sample(self, sampling: Sampling = GREEDY) -> Completion:
        return self.run(self.engine.generate(PROMPT, sampling))

    def gap(self, module: Any, told: Completion) -> float:
        return gap(module, PROMPT, {"ids": told.ids, "logprobs": told.logprobs})


@pytest.fixture(scope="module")
def rig(tmp_path_factory: Any) -> Iterator[Rig]:
    path = tmp_path_factory.mktemp("base")
    module = small_model(dtype=torch.float32, tie_word_embeddings=True, eos_token_id=None)
    module.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(100))}))
    made = Rig(path, module)
    yield made
    made.close()


@pytest.mark.parametrize("mode", ["adapter", "adapter_broadcast", "adapter_broadcast by memory", "broadcast", "disk"])
def test_versions_are_published_with_equal_fingerprints_and_served(rig: Rig, mode: str):
    bridge = rig.bridge(mode)
    for seed in (1, 2):
        if bridge.carries == "adapter":
            trained = adapted(rig.module, seed=seed)
        else:
            trained = small_model(seed=seed, dtype=torch.float32, tie_word_embeddings=True)
        sent, served = rig.publish(bridge, trained)
        assert sent.fingerprints == served.fingerprints
        told = rig.sample()
        assert set(told.versions) == {rig.version}
        assert rig.gap(trained, told) < NEAR
        assert rig.gap(rig.module, told) > FAR
    bridge.close()
    if bridge.carries == "full":  # what the others start from
        back = rig.bridge("disk")
        rig.publish(back, rig.module)
        back.close()


def test_only_the_engine_s_end_ids_end_an_answer_and_not_those_of_the_model_s_generation_config(rig: Rig):
    told = rig.sample(Sampling(max_tokens=40, temperature=1.0, seed=3))
    assert (len(told.ids), told.finish_reason) == (40, "length")
    assert any(token_id < 100 for token_id in told.ids)  # vLLM alone would have ended there


@pytest.mark.parametrize("mode", ["adapter", "adapter_broadcast"])
def test_versions_take_turns_in_the_slots_that_vllm_has_loaded_once(rig: Rig, mode: str):
    bridge = rig.bridge(mode)
    for seed in range(10, 16):
        trained = adapted(rig.module, seed=seed)
        sent, served = rig.publish(bridge, trained)
        assert sent.fingerprints == served.fingerprints
        assert rig.gap(trained, rig.sample()) < NEAR
        assert ("apply" in served.seconds) is False or seed < 12  # vLLM was asked for no more than it has slots
    assert len(rig.engine._exchange._adapters) == 2
    bridge.close()


def test_a_version_that_was_spoiled_on_its_way_is_refused_and_its_slot_takes_the_next(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    """Nobody looks at it on its way: it is compared as it is read back from vLLM's slot."""
    bridge = rig.bridge("adapter_broadcast by memory")
    for seed in (30, 31, 32):
        trained = adapted(rig.module, seed=seed)
        rig.publish(bridge, trained)
    broadcast, spoiled = BufferWriter.broadcast, rig.version + 1

    def spoil(self: Any, buffer: torch.Tensor, deadline: Any) -> int:
        buffer[100] ^= 1
        return broadcast(self, buffer, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(BufferWriter, "broadcast", spoil)
        with pytest.raises(SyncError, match="is not what was sent"):
            rig.publish(bridge, adapted(rig.module, seed=33))
    told = rig.sample()
    assert set(told.versions) == {spoiled - 1}
    assert rig.gap(trained, told) < NEAR
    trained = adapted(rig.module, seed=34)
    sent, served = rig.publish(bridge, trained)
    assert sent.fingerprints == served.fingerprints
    assert rig.gap(trained, rig.sample()) < NEAR
    assert len(rig.engine._exchange._adapters) == 2
    bridge.close()


def test_a_slot_that_requests_still_use_is_not_written_over(rig: Rig):
    bridge = rig.bridge("adapter")
    seen: list[tuple[Any, Completion]] = []

    async def under_way(trained: Any) -> None:
        told = await rig.engine.generate(PROMPT, Sampling(max_tokens=100, temperature=0.0))
        seen.append((trained, told))

    waiting: list[Any] = []
    for seed in range(20, 24):  # more versions in use than slots
        trained = adapted(rig.module, seed=seed)
        rig.publish(bridge, trained)
        waiting.append(rig.loop.create_task(under_way(trained)))
        rig.run(asyncio.sleep(0.05))
    rig.run(asyncio.gather(*waiting))
    assert len({told.versions[0] for _, told in seen}) == 4
    for trained, told in seen:
        assert len(set(told.versions)) == 1
        assert rig.gap(trained, told) < NEAR
    rig.publish(bridge, trained)
    assert len(rig.engine._exchange._adapters) == 2  # what was one too many is gone
    bridge.close()


def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(rig: Rig):
    bridge = rig.bridge("disk")
    rig.publish(bridge, rig.module)
    bridge.close()
    told = rig.sample(Sampling(max_tokens=16, temperature=0.7, top_p=0.6, seed=3))
    with torch.no_grad():
        logits = rig.module(torch.tensor([[*PROMPT, *told.ids]])).logits[0, len(PROMPT) - 1 : -1] / 0.7
    for row, token, logprob in zip(logits.double(), told.ids, told.logprobs, strict=True):
        probability, order = row.softmax(-1).sort(descending=True)
        kept = order[probability.cumsum(-1) - probability < 0.6]
        assert abs(row[kept].log_softmax(-1)[kept.tolist().index(token)].item() - logprob) < 0.001


def test_the_base_that_adapters_stand_upon_is_told(rig: Rig):
    from tandem.ops.digest import fingerprints

    bridge = AdapterBridge(deadline_s=20)
    source = bridge.source()
    rig.run(rig.engine.attach(source))
    assert source.reply["base"] == fingerprints(dict(served_weights.base(rig.module)))
    assert not {"compiled", "beside", "blocks"} & set(source.reply), "on a CPU there is nothing of the kind"
    assert source.reply["scheduler"] == {"requested": "in bulk", "engaged": True, "why_not": ""}
    bridge.close()


def test_a_version_that_is_refused_leaves_the_one_before_serving(rig: Rig):
    bridge = rig.bridge("adapter")
    before = rig.engine.version
    with pytest.raises(SyncError, match="--max-lora-rank"):
        rig.publish(bridge, adapted(rig.module, seed=9, rank=16))
    assert rig.engine.version == before
    assert rig.gap(rig.module, rig.sample()) < NEAR
    bridge.close()


@pytest.mark.parametrize("carries", ["full", "adapter"])
def test_a_load_that_was_given_up_leaves_the_one_before_serving(rig: Rig, carries: str):
    back = rig.bridge("disk")
    rig.publish(back, rig.module)
    back.close()
    made = BroadcastBridge("cpu", deadline_s=3) if carries == "full" else AdapterBroadcastBridge("cpu", deadline_s=3)
    before = rig.engine.version

    async def given_up() -> None:
        await rig.engine.attach(made.source(rig.engine.receivers))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await rig.engine.load(before + 1)  # nobody sends

    rig.run(given_up())
    made.close()
    assert not rig.engine.why_torn
    assert set(rig.sample().versions) == {before}
    assert rig.gap(rig.module, rig.sample()) < NEAR


@pytest.mark.parametrize("on_update", ["finish", "restart", "continue"])
def test_a_request_that_is_on_its_way_when_a_version_comes_holds_nobody_up(
    rig: Rig, on_update: str, monkeypatch: pytest.MonkeyPatch
):
    """It has passed the gate, and reaches vLLM when that would be paused."""
    bridge, stream = rig.bridge("disk"), rig.engine._process.stream  # pyright: ignore[reportPrivateUsage]

    gate = rig.engine._exchange._gate  # pyright: ignore[reportPrivateUsage]
    next_one = changed(rig.module)

    @asynccontextmanager
    async def slowly(path: str, body: Any, **more: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0.5)
        while on_update != "finish" and not gate._vllm_paused and rig.engine.version < rig.version:
            await asyncio.sleep(0.002)
        async with stream(path, body, **more) as answer:
            yield answer

    monkeypatch.setattr(rig.engine._process, "stream", slowly)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(gate, "on_update", on_update)

    async def both() -> Completion:
        asking = asyncio.ensure_future(rig.engine.generate(PROMPT, GREEDY))
        await asyncio.sleep(0.1)
        rig.version += 1
        async with asyncio.timeout(10):
            weights = full(next_one, rig.version)
            await asyncio.gather(asyncio.to_thread(bridge.send, weights), rig.engine.load(rig.version))
            return await asking

    rig.publish(bridge, rig.module)
    told = rig.run(both())
    assert set(told.versions) == {rig.version - 1 if on_update == "finish" else rig.version}
    assert rig.gap(rig.module if on_update == "finish" else next_one, told) < NEAR
    assert rig.gap(next_one if on_update == "finish" else rig.module, told) > FAR
    rig.publish(bridge, rig.module)
    bridge.close()


@pytest.mark.parametrize("mode", ["adapter", "disk"])
def test_asleep_it_answers_nobody_until_it_wakes_or_a_version_comes(rig: Rig, mode: str):
    """There is no sleep mode on a CPU, which the trainer is told: it pauses."""
    bridge = rig.bridge(mode)

    async def asked_while_asleep(then: Any) -> Completion:
        await rig.engine.sleep()
        asking = asyncio.ensure_future(rig.engine.generate(PROMPT, GREEDY))
        await asyncio.sleep(0.5)
        assert not asking.done()
        await then()
        return await asking

    assert set(rig.run(asked_while_asleep(rig.engine.wake)).versions) == {rig.engine.version}
    trained = adapted(rig.module, seed=3) if mode == "adapter" else rig.module
    rig.run(rig.engine.sleep())
    rig.publish(bridge, trained)
    told = rig.sample()
    assert set(told.versions) == {rig.version}
    assert rig.gap(trained, told) < NEAR
    bridge.close()


def test_the_trainer_is_told_that_no_memory_is_lent(rig: Rig):
    bridge = DiskBridge(rig.path / "versions", rig.path, buffers=[], deadline_s=20)
    source = bridge.source()
    rig.run(rig.engine.attach(source))
    assert source.reply["sleep"]["requested"] == "free"
    assert "no sleep mode" in source.reply["sleep"]["why_not"]
    assert rig.engine.lent_bytes == 0
    bridge.close()


def test_vllm_was_asked_to_remember_adapters_too_and_finds_them_intact(rig: Rig):
    bridge = rig.bridge("adapter")
    rig.publish(bridge, adapted(rig.module, seed=5))
    rig.run(rig.engine.remember())
    assert rig.run(rig.engine.intact())
    rig.publish(bridge, adapted(rig.module, seed=6))
    assert not rig.run(rig.engine.intact())
    bridge.close()
