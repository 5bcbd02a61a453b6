"""Several adapters of one base on one vLLM, each under its own name, through the engine's own methods."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_vllm_engine import FAR, GREEDY, NEAR, PROMPT, Rig
from vllm_cpu import adapted, gap, small_model

from tandem.errors import EngineError, SyncError
from tandem.model import served_weights
from tandem.ops.digest import fingerprints
from tandem.types import Completion, Sampling


@pytest.fixture(scope="module")
def rig(tmp_path_factory: Any) -> Iterator[Rig]:
    path = tmp_path_factory.mktemp("base")
    module = small_model(dtype=torch.float32, tie_word_embeddings=True, eos_token_id=None)
    module.save_pretrained(path)
    made = Rig(path, module)
    yield made
    made.close()


def test_named_adapters_are_proven_in_their_slots_and_none_is_dropped_while_it_answers(rig: Rig):
    async def put(name: str, trained: Any, **wrong: str) -> None:
        tensors = dict(served_weights.adapter(trained.base_model.model))
        sent = {key: tensor.detach().clone() for key, tensor in tensors.items()}
        await rig.engine.put_adapter(name, sent, {"r": 4}, {**fingerprints(sent), **wrong})

    async def play() -> None:
        trained = {name: adapted(rig.module, seed=40 + seed) for seed, name in enumerate("ab")}
        some = (
            f"base_model.model.{next(n for n, m in rig.module.named_modules() if n.endswith('q_proj'))}.lora_B.weight"
        )
        with pytest.raises(SyncError, match=r"adapter 'a': .*q_proj.lora_B.weight' is not what was sent"):
            await put("a", trained["a"], **{some: "0" * 16})
        for name, each in trained.items():
            await put(name, each)
        with pytest.raises(SyncError, match="all 2 slots of vLLM have adapters"):
            await put("c", trained["a"])
        asked = ["a", "", "b", "a", "b", ""]
        told = await asyncio.gather(*(rig.engine.generate(PROMPT, GREEDY, adapter=name) for name in asked))
        for name, each in zip(asked, told, strict=True):
            assert gap(trained.get(name, rig.module), PROMPT, vars_of(each)) < NEAR
            assert gap(trained["a" if name != "a" else "b"], PROMPT, vars_of(each)) > FAR
        long = asyncio.create_task(rig.engine.generate(PROMPT, Sampling(100, temperature=0.0), adapter="a"))
        await asyncio.sleep(0.2)
        with pytest.raises(EngineError, match="answers a request now"):
            await rig.engine.drop_adapter("a")
        assert len((await long).ids) == 100
        with pytest.raises(SyncError, match="drop them before another version"):
            await rig.engine.load(1)
        for name in trained:
            await rig.engine.drop_adapter(name)
        with pytest.raises(EngineError, match="there is no adapter 'a'"):
            await rig.engine.generate(PROMPT, GREEDY, adapter="a")

    rig.run(play())


def vars_of(told: Completion) -> dict[str, Any]:
    return {"ids": told.ids, "logprobs": told.logprobs}
