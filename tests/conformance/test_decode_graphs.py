"""The attention kernel of decode steps against plain torch, and graphs of them against launches.

TRITON_INTERPRET=1 runs the kernel without a GPU, but not in bfloat16, which the interpreter computes wrongly.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engines import ARCHITECTURES, adapter_of, complete, finish, make_engine, of_many_lengths, one_after_another

from tandem.engine.hf.decode_steps import DecodeSteps
from tandem.engine.hf.kv_cache import KvCache
from tandem.engine.hf.row_state import RowState
from tandem.ops import decode_attention
from tandem.ops.digest import fingerprints
from tandem.ops.lm_head import Head

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HYBRIDS = ["qwen3.5-delta-net", "lfm2-convolutions", "falcon-h1-both"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and not os.environ.get("TRITON_INTERPRET"), reason="needs an NVIDIA GPU"),
]
SHAPES = {  # rows, heads, heads of keys, positions, numbers a head, window
    "two heads share keys, many parts": (5, 4, 2, 200, 64, 0),
    "three share, odd numbers": (3, 6, 2, 130, 80, 0),
    "a window": (2, 8, 8, 70, 32, 17),
    "one part": (300, 2, 2, 70, 16, 33),
    "one row": (1, 16, 8, 900, 128, 0),
}
NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *[torch.bfloat16] * ON_GPU])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_is_plain_attention(shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    from tandem.ops import decode_attention_triton

    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
    rows, heads, key_heads, length, size, window = SHAPES[shape]
    torch.manual_seed(0)
    query = torch.randn(rows, heads, size).to(DEVICE, dtype)
    held = torch.randn(2, rows + 2, key_heads, length, size).to(DEVICE, dtype)[:, :rows]
    ends = torch.randint(1, length + 1, (rows,))
    ends[0], ends[-1] = 1, length
    found = decode_attention_triton.attend(query, held[0], held[1], ends.to(DEVICE), size**-0.5, window)
    plain = decode_attention.attend(query.cpu(), held[0].cpu(), held[1].cpu(), ends, None, window or None)
    torch.testing.assert_close(found.cpu(), plain, rtol=NEAR[dtype], atol=NEAR[dtype])


def check_alike(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Of 40 answers."""
    alike = sum(one.ids == other.ids for one, other in zip(found, expected, strict=True))
    assert alike >= 36  # a draw near an edge may go the other way by rounding
    for one, other in zip(found, expected, strict=True):
        if one.ids == other.ids:
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=2e-3)


@pytest.mark.skipif(not ON_GPU, reason="graphs are for GPUs")
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-sliding", "gemma3-mixed", *HYBRIDS])
def test_graphs_sample_what_launches_sample(name: str):
    module, asked = ARCHITECTURES[name]().to(DEVICE), of_many_lengths(40, most_tokens=60)
    expected = complete(make_engine("inline", module, max_running=24), asked)
    engine = make_engine("inline", module, max_running=24, eager=False)
    found = complete(engine, asked)
    assert engine.passes.steps.report == {"requested": "graphs", "engaged": True, "why_not": ""}
    assert len(engine.passes.steps.graphs.sizes) > 1
    check_alike(found, expected)


@pytest.mark.skipif(not ON_GPU, reason="graphs are for GPUs")
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-sliding", "gemma3-mixed"])
def test_prompts_alone_in_graphs_answer_as_by_launches(name: str):
    """With adapters and without; each is prefilled beside rows that decode."""
    plain, module = ARCHITECTURES[name](), ARCHITECTURES[name]().to(DEVICE)
    adapters = {each: adapter_of(plain, seed) for seed, each in enumerate("ab")}
    asked = of_many_lengths(40, most_tokens=8)

    async def play(engine: Any) -> list[Any]:
        for each, tensors in adapters.items():
            await engine.put_adapter(each, tensors, {"r": 4}, fingerprints(tensors))
        return await one_after_another(engine, asked, [["", "a", "b"][number % 3] for number in range(len(asked))])

    reference = make_engine("inline", module, max_running=60)
    expected = finish(reference, lambda: play(reference))
    engine = make_engine("inline", ARCHITECTURES[name]().to(DEVICE), max_running=60, eager=False)
    found = finish(engine, lambda: play(engine))
    assert engine.passes.prompts.report == {"requested": "graphs", "engaged": True, "why_not": ""}
    assert len(engine.passes.prompts.graphs.sizes) > 3  # of two widths at least, with adapters and without
    check_alike(found, expected)


@pytest.mark.skipif(not ON_GPU, reason="graphs are for GPUs")
def test_weights_that_move_are_the_ones_that_are_read():
    module = ARCHITECTURES["llama-gqa"]().to(DEVICE)
    state = RowState(4, torch.device(DEVICE))
    state.last_S.copy_(torch.arange(4))
    state.position_S.copy_(torch.tensor([5, 9, 2, 30]))
    with torch.inference_mode():
        cache = KvCache(2, 2**12)
        cache.reserve(4, 32)
        steps = DecodeSteps(module, Head(module, 64), cache, state, KvCache(2, 2**12))

        def addresses() -> list[int]:
            return [each.data_ptr() for each in module.parameters()]

        steps.graphs.weights_at(addresses())
        before = [steps.run(4).clone() for _ in range(3)]  # the third is the graph's
        assert steps.graphs.sizes == [4]
        torch.testing.assert_close(before[2], before[0], rtol=0, atol=1e-3)
        for parameter in module.parameters():
            parameter.data = parameter.data * 1.5
        steps.graphs.weights_at(addresses())
        assert not steps.graphs.sizes
        moved = [steps.run(4).clone() for _ in range(3)]
        assert (moved[0] - before[2]).abs().max() > 1e-2
        assert steps.graphs.sizes == [4]
        torch.testing.assert_close(moved[2], moved[0], rtol=0, atol=1e-3)


TILES = {  # slots of rows, capacity, rank, inputs, outputs of the layers with one input
    "some rows have none": ([2, -1, 0, 2, -1], 4, 4, 70, (50, 16, 25)),
    "more than a tile": ([0] * 20 + [1] * 3 + [-1] * 7 + [0] * 10, 2, 16, 300, (513, 130)),
    "an odd rank": ([3, 1, 3, -1, 15, 0, 0, 0, 3], 16, 20, 33, (64,)),
    "a high rank": ([1, 0, 1], 2, 70, 90, (140,)),
    "inputs for two warps": ([1, -1, 1, 0], 2, 16, 2100, (128, 128, 128)),
}


@pytest.mark.parametrize("early", [False, *[True] * ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *[torch.bfloat16] * ON_GPU])
@pytest.mark.parametrize("case", TILES)
def test_tiles_are_each_rows_own_product(case: str, dtype: torch.dtype, early: bool, monkeypatch: pytest.MonkeyPatch):
    from tandem.ops import adapter_rows_triton as kernels

    monkeypatch.setattr(kernels, "EARLY", early)
    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
    slots, capacity, rank, inputs, sizes = TILES[case]
    torch.manual_seed(0)
    x = torch.randn(len(slots), inputs).to(DEVICE, dtype)
    a = torch.randn(len(sizes), capacity, inputs, rank) / inputs**0.5
    b = [torch.randn(capacity, rank, size) / 4 for size in sizes]
    found = [torch.randn(len(slots), size).to(DEVICE, dtype) for size in sizes]
    expected = [each.double().cpu() for each in found]
    tiles = kernels.Tiles.empty(len(slots), torch.device(DEVICE))
    tiles.set(slots, kernels.most_tiles(len(slots), capacity))
    narrow = kernels.room(x, a).fill_(float("nan"))
    kernels.narrow(x, a.to(DEVICE), tiles, narrow)
    kernels.add_wide(narrow, [each.to(DEVICE) for each in b], found, tiles)
    for layer, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for row, slot in enumerate(slots):
            if slot >= 0:
                theirs[row] += x[row].double().cpu() @ a[layer, slot].double() @ b[layer][slot].double()
        torch.testing.assert_close(ours.double().cpu(), theirs, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("eager", [True, *[False] * ON_GPU])
def test_rows_with_adapters_sample_what_each_samples_alone(eager: bool, monkeypatch: pytest.MonkeyPatch):
    """With the kernels, by launches and in graphs; more adapters come while the engine lives."""
    from tandem.engine.hf import mixed_adapters
    from tandem.ops import adapter_rows_triton

    plain, module = ARCHITECTURES["llama-gqa"](), ARCHITECTURES["llama-gqa"]().to(DEVICE)
    adapters = {name: adapter_of(plain, seed) for seed, name in enumerate("abc")}
    asked = of_many_lengths(12, most_tokens=12)

    async def answers(engine: Any, names: str, most: int, new: str = "") -> list[Any]:
        for name in new:
            await engine.put_adapter(name, adapters[name], {"r": 4}, fingerprints(adapters[name]))
        pairs = zip(asked[:most], names * most, strict=False)
        return await asyncio.gather(*(engine.generate(*each, adapter=name.strip()) for each, name in pairs))

    async def all_of(engine: Any) -> list[Any]:
        few, many = await answers(engine, "a ", 6, new="a"), await answers(engine, "ab c", 12, new="bc")
        one = await answers(engine, "b", 1)  # few tokens: the kernels take its prompt too
        return [*few, *many, *await answers(engine, "ca", 12), *one]

    reference = make_engine("inline", plain, max_running=12)
    expected = finish(reference, lambda: all_of(reference))
    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
        monkeypatch.setattr(mixed_adapters, "kernels_for", lambda _: adapter_rows_triton)
        monkeypatch.setattr(adapter_rows_triton, "EARLY", False)
    engine = make_engine("inline", module, max_running=60, eager=eager)
    found = finish(engine, lambda: all_of(engine))
    alike = sum(one.ids == other.ids for one, other in zip(found, expected, strict=True))
    assert alike >= len(found) - 2
    assert found[-1].ids == expected[-1].ids
    assert len({tuple(each.ids) for each in found}) > 12
    if not eager:
        assert len(engine.passes.steps.graphs.sizes) > 1
