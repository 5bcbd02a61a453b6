"""Two workers, each with its shard: together they hold every tensor once, and say so."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from test_vllm_engine import NEAR, PROMPT, Rig
from vllm_cpu import adapted, logprobs_of, small_model

from tandem.types import Completion, Sampling


def test_shards_add_up_where_heads_are_split_and_where_they_are_replicated(tmp_path: Any):
    """One head of keys and values for two workers: both hold it."""
    module = small_model(dtype=torch.float32, num_key_value_heads=1, vocab_size=198, eos_token_id=None)
    module.save_pretrained(tmp_path)
    rig = Rig(tmp_path, module, tensor_parallel=2)
    try:
        for mode in ("adapter", "broadcast"):
            bridge = rig.bridge(mode)
            if mode == "adapter":
                trained = adapted(module, seed=1)
            else:
                trained = small_model(
                    seed=1, dtype=torch.float32, num_key_value_heads=1, vocab_size=198, eos_token_id=None
                )
            sent, served = rig.publish(bridge, trained)
            assert sent.fingerprints == served.fingerprints
            assert rig.gap(trained, rig.sample()) < NEAR
            if mode == "broadcast":
                rig.engine._exchange._gate.on_update = "continue"
                told = across_the_next_version(rig, bridge, module)
                assert set(told.versions) == {rig.version - 1, rig.version}
                before = told.versions.count(rig.version - 1)
                first = Completion(told.ids[:before], told.logprobs[:before], [], "length")
                assert rig.gap(trained, first) < NEAR
                logprobs = logprobs_of(module, PROMPT, told.ids)
                assert (logprobs - torch.tensor(told.logprobs))[before:].abs().mean() < NEAR
            bridge.close()
    finally:
        rig.close()


def across_the_next_version(rig: Rig, bridge: Any, module: Any) -> Completion:
    """A request that is held in both workers while it comes."""

    async def begun() -> asyncio.Task[Completion]:
        told: list[int] = []
        long = Sampling(max_tokens=110, seed=5)
        asked = rig.engine.generate(PROMPT, long, on_token=lambda token, *_: told.append(token))
        asking = asyncio.ensure_future(asked)
        while not told:
            await asyncio.sleep(0.002)
        await rig.engine.sleep()
        return asking

    asking = rig.run(begun())
    rig.publish(bridge, module)
    return rig.run(asking)
