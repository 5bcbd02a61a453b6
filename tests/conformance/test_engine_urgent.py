"""Somebody stands still for a version and its canary: neither waits until others have their answers."""

from __future__ import annotations

import asyncio
import time

import pytest
from engines import KINDS, finish, llama, make_engine, prompts
from server_engine import LinkedBridge

from tandem.bridge.inproc import InprocBridge
from tandem.ops.named_tensors import live_tensors
from tandem.types import Sampling, Weights

TOKENS = 2000  # 40 s: it takes a fraction of them, on the slowest of days


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_and_its_canary_come_past_a_full_engine_and_as_many_streams_as_there_may_be(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine.server.connection.STREAMS", 3)
    module = llama(max_position_embeddings=2048)
    module.get_input_embeddings().register_forward_pre_hook(lambda *_: time.sleep(0.02))
    engine = make_engine(kind, module, max_running=2)
    bridge = (LinkedBridge if kind == "server" else InprocBridge)(deadline_s=5)
    told: list[int] = []

    async def publish(version: int) -> None:
        bridge.send(Weights(version, "live", lambda: live_tensors(module)))
        await engine.load(version)

    async def play() -> None:
        await engine.attach(bridge.source(2 if kind == "pool" else 1))
        await publish(1)
        asked = [
            asyncio.create_task(
                engine.generate(
                    prompt, Sampling(max_tokens=TOKENS, seed=number), on_token=lambda _id, _logprob, at: told.append(at)
                )
            )
            for number, prompt in enumerate(prompts(*[12] * 9))
        ]
        while not told and not any(each.done() for each in asked):
            await asyncio.sleep(0.001)
        await engine.sleep()
        await publish(2)
        answer = await engine.generate(prompts(7)[0], Sampling(max_tokens=3, urgent=True))
        assert len(answer.ids) == 3
        assert set(answer.versions) == {2}
        assert not any(each.done() for each in asked)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    finish(engine, play)
