"""Logprobs that vLLM's workers keep, compared with those that vLLM's server sends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_cpu import PYTHON, gap, publish, small_model

from tandem.bridge.files.checkpoint import DiskBridge
from tandem.engine.vllm.engine import VllmEngine
from tandem.engine.vllm.options import VllmOptions
from tandem.engine.vllm.process import VllmProcess
from tandem.errors import EngineError
from tandem.types import Completion, Sampling

PROMPTS = [[*[5, 17, 33, 90, 121, 7, 64][: 2 + number % 5], number] for number in range(12)]
NEAR = 0.001
LONG = 1500  # tokens: it takes seconds, and what happens meanwhile has time to
BLOCKS = 70  # of 32 tokens: not enough for all that runs, so some are preempted


class Rig:
    def __init__(self, path: Path, module: Any) -> None:
        self.module, self.loop = module, asyncio.new_event_loop()
        options = VllmOptions(
            str(path),
            str(PYTHON),
            dtype="float32",
            device="cpu",
            max_running=12,
            max_context=2048,
            eager=True,
            further=["--skip-tokenizer-init", "--block-size", "32", "--num-gpu-blocks-override", str(BLOCKS)],
            environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO"},
        )
        self.log = path / "vllm.log"
        process = VllmProcess(options, path)
        process.wait_ready(300)
        self.engine = VllmEngine(process, end_ids=frozenset(), num_ids=200, on_update="restart")
        self.bridge = DiskBridge(path / "versions", path, buffers=(), deadline_s=20)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def sample(self, *prompts: list[int], **settings: Any) -> list[Completion]:
        async def all_of_them() -> list[Completion]:
            made = [Sampling(**{"max_tokens": 32, "seed": number, **settings}) for number in range(len(prompts))]
            return await asyncio.gather(*map(self.engine.generate, prompts, made))

        return self.run(all_of_them())

    def keeping(self) -> dict[str, int]:
        return self.run(self.engine._exchange.workers("tandem_keeping", deadline_s=10))[0]

    def counted(self, name: str) -> float:
        """By vLLM itself."""

        async def ask() -> str:
            return (await self.engine._process._http.ask("GET", "/metrics", within_s=10)).text

        lines = self.run(ask()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    def streamed(self, *prompts: list[int], **settings: Any) -> list[Completion]:
        """As it is where workers cannot keep anything."""
        sampled, self.engine._sampled = self.engine._sampled, None
        try:
            return self.sample(*prompts, **settings)
        finally:
            self.engine._sampled = sampled


@pytest.fixture(scope="module")
def rig(tmp_path_factory: Any) -> Iterator[Rig]:
    path = tmp_path_factory.mktemp("base")
    module = small_model(dtype=torch.float32, tie_word_embeddings=True, eos_token_id=None, max_position_embeddings=2048)
    module.save_pretrained(path)
    made = Rig(path, module)
    yield made
    made.bridge.close()
    made.run(made.engine.close())
    made.loop.close()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.7, "top_k": 9}])
def test_what_is_kept_is_what_vllm_itself_sends(rig: Rig, settings: dict[str, Any]):
    kept, streamed = rig.sample(*PROMPTS[:3], **settings), rig.streamed(*PROMPTS[:3], **settings)
    assert rig.engine._why_streamed == ""
    assert [each.ids for each in kept] == [each.ids for each in streamed]
    for one, other in zip(kept, streamed, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert rig.keeping()["unread"] == 0


def test_what_was_preempted_has_all_of_its_logprobs(rig: Rig):
    before = rig.counted("vllm:num_preemptions_total")
    done = rig.sample(*PROMPTS, max_tokens=300)
    assert rig.counted("vllm:num_preemptions_total") > before
    for prompt, each in zip(PROMPTS, done, strict=True):
        assert len(each.ids) == 300
        assert gap(rig.module, prompt, {"ids": each.ids, "logprobs": each.logprobs}) < NEAR


def test_tokens_are_told_while_they_are_made(rig: Rig):
    told: list[tuple[int, float, int]] = []
    seen: list[int] = []

    async def play() -> Completion:
        asked = rig.engine.generate(
            PROMPTS[0], Sampling(max_tokens=LONG, seed=3), on_token=lambda *token: told.append(token)
        )
        answer = asyncio.ensure_future(asked)
        while not answer.done():
            seen.append(len(told))
            await asyncio.sleep(0.005)
        return await answer

    done = rig.run(play())
    assert told == list(zip(done.ids, done.logprobs, done.versions, strict=True))
    assert len({count for count in seen if 0 < count < LONG}) >= 2


def test_an_id_that_stops_is_the_last_one_that_is_told(rig: Rig):
    (free,) = rig.sample(PROMPTS[1])
    stop = free.ids[10]
    told: list[int] = []
    sampling = Sampling(max_tokens=32, seed=0, stop_ids=(stop,))
    done = rig.run(rig.engine.generate(PROMPTS[1], sampling, on_token=lambda token, *_: told.append(token)))
    assert done.ids == free.ids[: free.ids.index(stop) + 1]
    assert (done.finish_reason, free.finish_reason) == ("stop", "length")
    assert told == done.ids


def test_what_is_given_up_or_begun_again_leaves_nothing_behind(rig: Rig):
    told: list[int] = []

    async def play(seed: int) -> Completion | None:
        """None where both had ended before anybody looked: vLLM's CPU build spins, and others may wait for seconds."""
        told.clear()
        long = Sampling(max_tokens=LONG, seed=seed)
        given_up = asyncio.ensure_future(rig.engine.generate(PROMPTS[2], long))
        begun_again = asyncio.ensure_future(
            rig.engine.generate(PROMPTS[3], long, on_token=lambda _id, _logprob, version: told.append(version))
        )
        while not told:
            await asyncio.sleep(0.005)
        given_up.cancel()
        exchange = rig.engine._exchange
        await exchange._gate.shut(20)  # as for a new version: this engine ends what runs
        late = not given_up.cancelled() or begun_again.done()
        await publish(rig.engine, rig.bridge, rig.module)
        done = await begun_again
        return None if late or set(done.versions) == {before} else done

    for attempt in range(8):
        before = rig.engine.version
        if (done := rig.run(play(attempt))) is not None:
            break
    assert done is not None, "it never came in time to give anything up"
    assert set(done.versions) == {before + 1}
    assert set(told) == {before, before + 1}
    assert gap(rig.module, PROMPTS[3], {"ids": done.ids, "logprobs": done.logprobs}) < NEAR
    rig.sample(PROMPTS[0])  # what was dropped is said with the next reading, and what ended with the next step
    rig.sample(PROMPTS[0])
    assert rig.keeping()["unread"] == 0
    assert rig.keeping()["under_way"] <= 1


def test_a_refusal_is_told_as_one(rig: Rig):
    with pytest.raises(EngineError, match=r"refuses a request: .*2048"):
        rig.sample([1] * 3000)
