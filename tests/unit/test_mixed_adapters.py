"""Rows of one batch with different LoRA adapters answer as each adapter does alone, merged into the base."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engine.hf.engine import EmbeddedEngine
from tandem.engine.hf.mixed_adapters import MixedAdapters
from tandem.errors import EngineError, SyncError
from tandem.model.presets import make_model
from tandem.ops.digest import fingerprints
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Sampling

RANKS = {"a": 4, "b": 8, "c": 2}


@pytest.fixture(scope="module")
def base() -> Any:
    return make_model("tiny", byte_tokenizer(), 0).eval()


def adapter(module: Any, name: str, layers: str = "") -> dict[str, Tensor]:
    torch.manual_seed(ord(name))
    tensors = dict[str, Tensor]()
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and path != "lm_head" and layers in path:
            owner = f"base_model.model.{path}"
            tensors[f"{owner}.lora_A.weight"] = torch.randn(RANKS[name], layer.in_features) / 4
            tensors[f"{owner}.lora_B.weight"] = torch.randn(layer.out_features, RANKS[name]) / 8
    return tensors


def engine_of(module: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine(
        module, num_ids=256, end_ids=frozenset(), decode=lambda ids: "", kv_gib=0.1
    )  # fmt: skip
    engine.version = 3
    return engine


async def put(engine: EmbeddedEngine, name: str, tensors: dict[str, Tensor], **wrong: Any) -> None:
    await engine.put_adapter(name, tensors, {"r": RANKS[name]}, {**fingerprints(tensors), **wrong})


def merged(module: Any, tensors: dict[str, Tensor]) -> Any:
    whole = copy.deepcopy(module)
    for path, layer in whole.named_modules():
        owner = f"base_model.model.{path}"
        if (a := tensors.get(f"{owner}.lora_A.weight")) is not None:
            layer.weight.data += tensors[f"{owner}.lora_B.weight"] @ a
    return whole


def test_each_row_answers_as_its_adapter_alone_would(base: Any):
    module, adapters = copy.deepcopy(base), {name: adapter(base, name) for name in ("a", "b")}
    adapters["c"] = adapter(base, "c", "mlp")  # fewer layers, another rank
    prompt, sampling = [5, 6, 7, 8], Sampling(12, seed=4)

    async def alone(whole: Any) -> Completion:
        engine = engine_of(whole)
        try:
            return await engine.generate(prompt, sampling)
        finally:
            await engine.close()

    async def play() -> None:
        expected = {name: await alone(merged(base, tensors)) for name, tensors in adapters.items()}
        expected[""] = await alone(copy.deepcopy(base))
        assert len({tuple(each.ids) for each in expected.values()}) == 4
        engine = engine_of(module)
        for name, tensors in adapters.items():
            await put(engine, name, tensors)
        for names in ("a", "aa", "abc", "cba", "abcabc", "aab", ["a", "", "c", ""], ["", "", "b"], ["c", "a", "", "a"]):
            told = await asyncio.gather(*(engine.generate(prompt, sampling, adapter=name) for name in names))
            for name, each in zip(names, told, strict=True):
                assert each.ids == expected[name].ids, (names, name)
                assert each.logprobs == pytest.approx(expected[name].logprobs, abs=1e-4)
        # A row that ends early, or comes later, changes nothing for the others.
        asked = [("a", 3), ("b", 12), ("", 5), ("c", 12), ("a", 9)]
        told = await asyncio.gather(
            *(engine.generate(prompt, Sampling(tokens, seed=4), adapter=name) for name, tokens in asked)
        )
        for (name, tokens), each in zip(asked, told, strict=True):
            assert each.ids == expected[name].ids[:tokens]

        async def ask(*names: str) -> list[list[int]]:
            told = await asyncio.gather(*(engine.generate(prompt, sampling, adapter=name) for name in names))
            return [each.ids for each in told]

        await ask("a", "c")
        await engine.drop_adapter("c")
        await engine.put_adapter("again", adapters["b"], {"r": RANKS["b"]}, fingerprints(adapters["b"]))
        assert await ask("a", "again") == [expected["a"].ids, expected["b"].ids]  # where c was
        assert await ask("again") == [expected["b"].ids]
        assert await ask("b", "a", "") == [expected[name].ids for name in ("b", "a", "")]
        with pytest.raises(EngineError, match="no adapter 'c'"):
            await engine.generate(prompt, sampling, adapter="c")
        await engine.close()

    asyncio.run(play())


def test_an_adapter_that_is_not_what_was_sent_or_does_not_fit_is_refused_and_the_others_stay(base: Any):
    module, tensors = copy.deepcopy(base), adapter(base, "a")

    async def play() -> None:
        engine = engine_of(module)
        await put(engine, "a", tensors)
        before = await engine.generate([5, 6], Sampling(6), adapter="a")
        other, some = adapter(base, "b"), next(iter(tensors))
        with pytest.raises(SyncError, match="is not what was sent"):
            await put(engine, "b", other, **{some: fingerprints(tensors)[some]})
        with pytest.raises(SyncError, match="has only one of its two matrices"):
            await put(engine, "b", {some: other[some]})
        with pytest.raises(EngineError, match="no adapter 'b'"):
            await engine.generate([5, 6], Sampling(6), adapter="b")
        again = await engine.generate([5, 6], Sampling(6), adapter="a")
        assert (again.ids, again.logprobs) == (before.ids, before.logprobs)
        await engine.close()

    asyncio.run(play())


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_rows_that_run_on_with_the_same_adapters_are_not_planned_again(base: Any):
    """A plan is made while the GPU waits."""
    adapters, module = MixedAdapters(copy.deepcopy(base), 4), copy.deepcopy(base)
    for name in "ab":
        adapters.put(name, tensors := adapter(module, name), {"r": RANKS[name]}, fingerprints(tensors))

    def operations(*names: str, tokens: int = 1) -> int:
        with Operations() as counted:
            adapters.plan(list(names), tokens)
        return counted.number

    assert operations("b", "a", "", "b") > 0
    assert operations("b", "a", "", "b") == 0
    assert operations("b", "a", "b", "") > 0
    assert operations("b", "a", "b", "") == 0
    adapters.put("a", tensors := adapter(module, "a", "mlp"), {"r": RANKS["a"]}, fingerprints(tensors))
    assert operations("b", "a", "b", "") > 0  # it lies in another slot now


def test_an_adapter_that_overflows_fails_its_own_requests_and_no_others(base: Any):
    """As one does whose training has diverged: its numbers are finite, and what it computes is not."""
    good = adapter(base, "a")
    wild = {name: tensor * 1e25 for name, tensor in adapter(base, "c", "layers.0.mlp").items()}
    sampling = Sampling(5, seed=4)

    async def play() -> None:
        engine = engine_of(copy.deepcopy(base))
        await put(engine, "a", good)
        await put(engine, "c", wild)
        prompts = {name: [5, 6, 7, 8] for name in ("a", "")} | {"c": list(range(40))}
        expected = {name: (await engine.generate(prompts[name], sampling, adapter=name)).ids for name in ("a", "")}
        for names in ("c", "a", ["c", "a", ""], ["a", "", "c"], ["a", "", ""]):
            asked = (engine.generate(prompts[name], sampling, adapter=name) for name in names)
            for name, told in zip(names, await asyncio.gather(*asked, return_exceptions=True), strict=True):
                if name == "c":
                    assert isinstance(told, EngineError)
                    assert "adapter 'c': its logits are not finite" in str(told)
                else:
                    assert isinstance(told, Completion), told
                    assert told.ids == expected[name], names
        await engine.close()

    asyncio.run(play())
