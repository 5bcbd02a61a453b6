"""Requests that go on under the next version, as they do by themselves (`on_update = "auto"`), with a real vLLM: each
token is exact for the version that is said to have made it, with everything before it computed anew. On a GPU with
TANDEM_VLLM_DEVICE=cuda."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_cpu import PYTHON, adapted, changed, logprobs_of, publish, small_model

from tandem.bridge.files.adapter import AdapterBridge
from tandem.bridge.files.checkpoint import DiskBridge
from tandem.engine.vllm.engine import VllmEngine
from tandem.engine.vllm.options import VllmOptions
from tandem.engine.vllm.process import VllmProcess
from tandem.errors import EngineLost, SyncError
from tandem.model import served_weights
from tandem.types import Completion, Sampling, Weights

PROMPTS = [[*[5, 17, 33, 90, 121, 7, 64] * 6, number // 2] for number in range(8)]
"""Two of each, longer than a block: what they share is found by its prefix."""
LONG = 1800  # tokens: it takes seconds, and what happens meanwhile has time to
DEVICE = os.environ.get("TANDEM_VLLM_DEVICE", "cpu")
DTYPE, NEAR, FAR = (torch.float32, 0.0002, 0.02) if DEVICE == "cpu" else (torch.bfloat16, 0.05, 0.2)
"""How far means of logprobs may be from those of the version that made the tokens, and are from another's."""


class Rig:
    def __init__(self, path: Path, module: Any) -> None:
        self.path, self.loop, self.modules = path, asyncio.new_event_loop(), {0: module}
        self.told: list[int] = []
        options = VllmOptions(
            str(path), str(PYTHON), dtype=str(DTYPE).removeprefix("torch."), device=DEVICE, max_running=6,
            max_context=2048, eager=DEVICE == "cpu", memory_share=0.1, adapter_slots=2, max_rank=8,
            further=["--skip-tokenizer-init", "--block-size", "32", "--max-num-batched-tokens", "2048"],
            environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("tandem.engine.vllm.process._LEAST_REQUESTS", 2)  # twelve at a time
            process = VllmProcess(options, path)
        process.wait_ready(300)
        self.engine = VllmEngine(process, end_ids=frozenset(), num_ids=200, version=0)
        self.bridge = DiskBridge(path / "versions", path, buffers=(), deadline_s=20)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def publish(self, module: Any) -> None:
        self.modules[self.engine.version + 1] = module
        await publish(self.engine, self.bridge, module)

    def ask(self, number: int, **settings: Any) -> asyncio.Task[Completion]:
        made = Sampling(**{"max_tokens": LONG, "seed": number, **settings})
        asked = self.engine.generate(
            PROMPTS[number % len(PROMPTS)], made, on_token=lambda _id, _logprob, version: self._tell(version)
        )
        return asyncio.ensure_future(asked)

    def alone(self, number: int) -> Completion:
        return self.run(self.engine.generate(PROMPTS[number], Sampling(max_tokens=8, seed=number)))

    def _tell(self, version: int) -> None:
        self.told.append(version)

    async def until_told(self, count: int, version: int | None = None) -> None:
        async with asyncio.timeout(60):
            while sum(version in (None, each) for each in self.told) < count:
                await asyncio.sleep(0.002)

    def off(self, number: int, done: Completion, *, by: int | None = None) -> float:
        """By how many nats, in the mean, logprobs differ from those of the version which is said to have made their
        tokens, or of the version `by`; of the worst version."""
        worst = 0.0
        for version in set(done.versions):
            ours = logprobs_of(self.modules[version if by is None else by], PROMPTS[number], done.ids)
            made = torch.tensor([each == version for each in done.versions])
            worst = max(worst, (ours - torch.tensor(done.logprobs))[made].abs().mean().item())
        return worst


@pytest.fixture(scope="module")
def rig(tmp_path_factory: Any) -> Iterator[Rig]:
    path = tmp_path_factory.mktemp("base")
    module = small_model(dtype=DTYPE, tie_word_embeddings=True, eos_token_id=None, max_position_embeddings=2048)
    module.save_pretrained(path)
    made = Rig(path, module)
    yield made
    made.bridge.close()
    made.run(made.engine.close())
    made.loop.close()


@pytest.fixture(autouse=True)
def forget(rig: Rig) -> None:
    rig.told.clear()


def test_each_token_is_exact_for_the_version_that_made_it(rig: Rig):
    """Eight ask and six run; two versions come meanwhile, the first when those that run have more tokens than vLLM
    computes in one step."""
    first = rig.engine.version

    async def play() -> list[Completion]:
        asked = [rig.ask(number) for number in range(len(PROMPTS))]
        for seed, count in ((1, 2000), (2, 60)):
            await rig.until_told(count, rig.engine.version)
            await rig.publish(changed(rig.modules[0], seed))
        return await asyncio.gather(*asked)

    done = rig.run(play())
    assert all(len(each.ids) == LONG and each.versions == sorted(each.versions) for each in done)
    assert sum(set(each.versions) == {first, first + 1, first + 2} for each in done) >= 4
    assert max(rig.off(number, each) for number, each in enumerate(done)) < NEAR
    assert min(rig.off(number, each, by=first + 2) for number, each in enumerate(done[:4])) > FAR
    assert sorted(rig.told) == sorted(version for each in done for version in each.versions)
    again = rig.alone(0)  # what was found by its prefix is of this version
    assert set(again.versions) == {first + 2}
    assert rig.off(0, again) < NEAR


def test_a_request_whose_end_only_vllm_s_server_knows_is_waited_for_and_the_others_are_held(rig: Rig):
    before = rig.engine.version

    async def play() -> list[Completion]:
        waited_for, held = rig.ask(0, max_tokens=100, stop=("never",)), rig.ask(1)
        await rig.until_told(10)
        await rig.publish(changed(rig.modules[0], 3))
        assert waited_for.done()
        assert not held.done()
        return await asyncio.gather(waited_for, held)

    waited_for, held = rig.run(play())
    assert set(waited_for.versions) == {before}
    assert set(held.versions) == {before, before + 1}
    assert max(rig.off(number, each) for number, each in enumerate((waited_for, held))) < NEAR


def test_who_is_urgent_comes_past_those_that_go_on_and_those_that_wait(rig: Rig):
    """And those that may not even be asked yet: a version's canary, for which the trainer stands still."""
    before = rig.engine.version

    async def play() -> Completion:
        others = [rig.ask(number, max_tokens=LONG // 2) for number in range(2 * len(PROMPTS))]
        await rig.until_told(600)
        await rig.publish(changed(rig.modules[0], 5))
        async with asyncio.timeout(60):
            answer = await rig.engine.generate(PROMPTS[0], Sampling(max_tokens=3, temperature=0.0, urgent=True))
        assert not any(each.done() for each in others)
        await asyncio.gather(*others)
        return answer

    answer = rig.run(play())
    assert set(answer.versions) == {before + 1}
    assert rig.off(0, answer) < NEAR


@pytest.mark.parametrize("untouched", [True, False])
def test_if_a_load_fails_who_is_held_goes_on_under_the_version_before_unless_that_is_torn(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, untouched: bool
):
    before, workers = rig.engine.version, rig.engine._exchange.workers

    async def broken(method: str, *args: Any, **how: Any) -> Any:
        if method == "tandem_load":
            raise SyncError("it broke off")
        answers = await workers(method, *args, **how)
        return [each | {"untouched": untouched} for each in answers] if method == "tandem_status" else answers

    async def play() -> Completion:
        asked = rig.ask(0)
        await rig.until_told(10)
        monkeypatch.setattr(rig.engine._exchange, "workers", broken)
        with pytest.raises(SyncError, match="broke off"):
            await rig.publish(rig.modules[0])
        monkeypatch.undo()
        assert not (untouched and asked.done())
        return await asyncio.wait_for(asked, 60)

    if untouched:
        done = rig.run(play())
        assert len(done.ids) == LONG
    else:
        with pytest.raises(EngineLost, match="serves nothing until a version is loaded"):
            rig.run(play())
        rig.run(rig.publish(rig.modules[0]))
        before, done = before + 1, rig.alone(0)
    assert set(done.versions) == {before}
    assert rig.off(0, done) < NEAR


def test_who_is_held_while_it_sleeps_goes_on_when_it_wakes_unless_given_up(rig: Rig):
    async def play() -> Completion:
        asked, given_up = rig.ask(0), rig.ask(1)
        await rig.until_told(10)
        await rig.engine.sleep()
        told = -1
        while told != len(rig.told):  # what was made before it slept
            told = len(rig.told)
            await asyncio.sleep(1)
        assert told < 2 * LONG
        given_up.cancel()
        await rig.engine.wake()
        return await asked

    done = rig.run(play())
    assert rig.off(0, done) < NEAR
    assert not rig.engine._exchange._gate.is_asked("base")


def test_under_an_adapter_requests_end_with_the_one_that_they_began_with(rig: Rig):
    met: list[dict[str, Any]] = []
    bridge = AdapterBridge(deadline_s=20)
    source = bridge.source(1)
    attached = source.attached
    source.attached = lambda reply: (met.append(dict(reply)), attached(reply))[1]
    trained = {version: adapted(rig.modules[0], seed=version) for version in (1, 2)}
    rig.run(rig.publish(rig.modules[0]))
    first = rig.engine.version
    rig.run(rig.engine.attach(source))

    async def give(number: int) -> None:
        module = trained[number]
        weights = Weights(
            first + number,
            "adapter",
            lambda: served_weights.adapter(module.base_model.model),
            served_weights.adapter_config(module),
        )
        await asyncio.gather(asyncio.to_thread(bridge.send, weights), rig.engine.load(first + number))
        rig.modules[first + number] = module

    async def play() -> Completion:
        await give(1)
        asked = rig.ask(0)
        await rig.until_told(50)
        await give(2)
        assert not asked.done()
        return await asked

    done = rig.run(play())
    bridge.close()
    assert met[0]["on_update"]["note"].startswith("finish, for requests end under the adapter")
    assert set(done.versions) == {first + 1}
    assert rig.off(0, done) < NEAR
