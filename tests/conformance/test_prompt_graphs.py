"""Prompts that come alone, as graphs, give what the same prompts give by launches.

Where there is no GPU, a tape stands in for a CUDA graph: what was asked of torch is asked again, of the same memory. A
number that Python computed meanwhile stays as it was, as in a graph; and recording changes nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engines import ARCHITECTURES, Request, adapter_of, check_same, finish, make_engine, one_after_another, prompts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tandem.engine.hf import graphs_by_kind, mixed_adapters
from tandem.engine.hf.kv_cache import KvCache
from tandem.ops.digest import fingerprints
from tandem.ops.named_tensors import live_tensors
from tandem.types import Completion, Sampling, WeightKind, Weights

LENGTHS = (5, 12, 16, 3, 17, 33, 20, 1, 40, 9, 70, 66)


class Tape(TorchDispatchMode):
    replayed = 0

    def __init__(self, launch: Callable[[], object]) -> None:
        super().__init__()
        self._asked = list[tuple[Any, Any, Any, Any]]()
        self._before = dict[int, tuple[Tensor, Tensor]]()
        with self:
            launch()
        for memory, was in self._before.values():
            memory.copy_(was)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::item", "aten::_local_scalar_dense"):
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
                self._before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        result = func(*args, **(kwargs or {}))
        self._asked.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        Tape.replayed += 1
        made = dict[int, Any]()

        def now(each: Any) -> Any:
            return made.get(id(each), each)

        for func, args, kwargs, result in self._asked:
            found = func(*tree_map(now, args), **tree_map(now, kwargs))
            made |= {id(old): new for old, new in zip(tree_leaves(result), tree_leaves(found), strict=True)}


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs_by_kind, "DEVICES", ("cpu",))
    monkeypatch.setattr(graphs_by_kind, "record_graph", lambda launch, device, pool=None: Tape(launch))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(Tape, "replayed", 0)


def asked_for(*lengths: int, tokens: int = 6) -> list[Request]:
    return [
        (prompt, Sampling(tokens + number % 5, temperature=1.0, seed=number))
        for number, prompt in enumerate(prompts(*lengths))
    ]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3", "llama-gqa", "mistral-sliding", "gemma3-mixed", "gpt2", "granite-scaled",
        "qwen3.5-delta-net", "lfm2-convolutions", "falcon-h1-both",
    ],
)  # fmt: skip
def test_a_prompt_alone_answers_as_it_does_by_launches(name: str):
    """Rows, lengths and widths vary; the cache grows, so that graphs are dropped; rows end and move."""
    asked = asked_for(*LENGTHS, *LENGTHS)
    reference = make_engine("inline", ARCHITECTURES[name](), max_running=6)
    expected = finish(reference, lambda: one_after_another(reference, asked))
    engine = make_engine("inline", ARCHITECTURES[name](), max_running=6, eager=False)
    assert engine.passes.prompts.report == {"requested": "graphs", "engaged": True, "why_not": ""}
    Tape.replayed = 0
    found = finish(engine, lambda: one_after_another(engine, asked))
    check_same(found, expected)
    assert {16, 32} < {*engine.passes.prompts.graphs.sizes}
    assert engine.passes.steps.graphs.sizes


def test_a_prompt_is_recorded_the_second_time_and_replayed_from_then_on():
    engine = make_engine("inline", ARCHITECTURES["llama-gqa"](), max_running=6, eager=False)
    asked, seen = [(prompt, Sampling(1)) for prompt in prompts(3, 5, 14, 16)], list[tuple[int, list[int]]]()
    Tape.replayed = 0

    async def play() -> None:
        for each in asked:
            await engine.generate(*each)
            seen.append((Tape.replayed, engine.passes.prompts.graphs.sizes))

    finish(engine, play)
    assert seen == [(0, []), (0, [16]), (1, [16]), (2, [16])]


def test_a_prompt_is_not_filled_up_beyond_the_memory_or_the_model():
    """GPT-2 has an embedding for each of 160 positions; kv_gib holds 80 positions."""
    asked = [(prompt, Sampling(4, seed=1)) for prompt in prompts(130, 131, 132)]
    reference = make_engine("inline", ARCHITECTURES["gpt2"]())
    expected = finish(reference, lambda: one_after_another(reference, asked))
    engine = make_engine("inline", ARCHITECTURES["gpt2"](), eager=False)
    check_same(finish(engine, lambda: one_after_another(engine, asked)), expected)
    assert not engine.passes.prompts.graphs.sizes
    few = make_engine("inline", ARCHITECTURES["gpt2"](), eager=False, kv_gib=80 * 2 * 2 * 64 * 4 / 2**30)
    short = [(prompt[:70], sampling) for prompt, sampling in asked]
    finish(few, lambda: one_after_another(few, short))
    assert not few.passes.prompts.graphs.sizes


def waiting(module: Any, *, on: Sequence[bool]) -> Any:
    """Return the module, which reads a number back from the GPU while `on` is not empty."""

    def read(_: Any, inputs: Any, output: Any) -> None:
        if on:
            output[0].sum().item()

    module.model.layers[1].register_forward_hook(read)
    return module


def test_a_model_that_waits_for_the_gpu_is_launched_and_the_report_says_why():
    module = ARCHITECTURES["llama-gqa"]()
    asked = asked_for(*LENGTHS)
    reference = make_engine("inline", module, max_running=6)
    expected = finish(reference, lambda: one_after_another(reference, asked))
    engine = make_engine("inline", waiting(module, on=[True]), max_running=6, eager=False)
    why = "RuntimeError: operation not permitted when stream is capturing"
    assert engine.passes.prompts.report == {"requested": "graphs", "engaged": False, "why_not": why}
    check_same(finish(engine, lambda: one_after_another(engine, asked)), expected)
    assert not engine.passes.prompts.graphs.sizes


def test_what_cannot_be_recorded_later_is_said(caplog: pytest.LogCaptureFixture):
    waits = list[bool]()
    module = waiting(ARCHITECTURES["llama-gqa"](), on=waits)
    engine = make_engine("inline", module, max_running=6, eager=False)
    waits.append(True)
    with caplog.at_level(logging.WARNING):
        found = finish(engine, lambda: one_after_another(engine, asked_for(*LENGTHS)))
    assert all(each.ids for each in found)
    assert "stream is capturing" in engine.passes.prompts.report["why_not"]
    assert Counter(each.getMessage().partition(" are launched")[0] for each in caplog.records) == {
        "decode steps": 1,
        "prefills of one prompt": 1,
    }


class PlainTiles:
    """The kernels of tiles in plain torch: an adapter of each row is read from a tensor."""

    def __init__(self, slots_R: Tensor) -> None:
        self.slots_R = slots_R

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> PlainTiles:
        return cls(torch.full((rows,), -1, device=device))

    def set(self, slots: Sequence[int], most: int) -> None:
        self.slots_R[: len(slots)] = torch.tensor(slots)


class PlainKernels:
    Tiles = PlainTiles

    @staticmethod
    def most_tiles(rows: int, capacity: int) -> int:
        return rows

    @staticmethod
    def room(x_RI: Tensor, a_LCIE: Tensor) -> Tensor:
        return x_RI.new_empty(len(a_LCIE), len(x_RI), a_LCIE.shape[3])

    @staticmethod
    def narrow(x_RI: Tensor, a_LCIE: Tensor, tiles: PlainTiles, into_LRE: Tensor) -> None:
        slots_R = tiles.slots_R[: len(x_RI)]
        products = torch.einsum("ri,lrie->lre", x_RI, a_LCIE[:, slots_R.clamp(min=0)])
        into_LRE.copy_(products * (slots_R >= 0)[None, :, None])

    @staticmethod
    def add_wide(narrow_LRE: Tensor, b_LCEO: Sequence[Tensor], outputs_LRO: Sequence[Tensor], tiles: PlainTiles):
        slots_R = tiles.slots_R[: narrow_LRE.shape[1]].clamp(min=0)
        for narrow_RE, b_CEO, output_RO in zip(narrow_LRE, b_LCEO, outputs_LRO, strict=True):
            output_RO += torch.einsum("re,reo->ro", narrow_RE, b_CEO[slots_R])


def test_one_graph_serves_every_adapter_until_their_memory_moves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mixed_adapters, "kernels_for", lambda device: PlainKernels)
    adapters = {name: adapter_of(ARCHITECTURES["llama-gqa"](), seed) for seed, name in enumerate("abcd")}
    asked, names = asked_for(*LENGTHS), ["a", "b", "", "a", "b", "b", "", "a", "a", "b", "b", "a"]

    async def play(engine: Any) -> list[Completion]:
        for name in "ab":
            await engine.put_adapter(name, adapters[name], {"r": 4}, fingerprints(adapters[name]))
        found = await one_after_another(engine, asked, names)
        await one_after_another(engine, asked, names)
        for name in "cd":  # more than there is room for
            await engine.put_adapter(name, adapters[name], {"r": 4}, fingerprints(adapters[name]))
        return found + await one_after_another(engine, asked, ["cdab"[number % 4] for number in range(len(asked))])

    reference = make_engine("inline", ARCHITECTURES["llama-gqa"](), max_running=70)
    expected = finish(reference, lambda: play(reference))
    engine = make_engine("inline", ARCHITECTURES["llama-gqa"](), max_running=70, eager=False)
    found = finish(engine, lambda: play(engine))
    check_same(found, expected)
    assert len({tuple(each.ids) for each in found}) == len(found)
    assert {16, 32, 64} <= {*engine.passes.prompts.graphs.sizes}


class Elsewhere:
    """A trainer's end whose versions, or whose memory for them, are not where the engine's weights are now."""

    def __init__(self, carries: WeightKind, tensors: dict[str, Tensor]) -> None:
        self.carries, self._tensors = carries, tensors

    def attached(self, reply: object) -> None: ...

    def memory_for(self, tensors: object) -> dict[str, Tensor] | None:
        return self._tensors if self.carries == "live" else None

    def receive(self, version: int, rank: int = 0) -> Weights:
        return Weights(version, self.carries, lambda: iter(self._tensors.items()), expected=fingerprints(self._tensors))


@pytest.mark.parametrize("carries", ["full", "live"])
def test_graphs_do_not_outlive_the_weights_that_they_read(carries: WeightKind):
    """Full versions arrive in other memory; a trainer that attaches may move the weights into its own."""
    module = ARCHITECTURES["llama-gqa"]()
    engine = make_engine("inline", module, max_running=6, eager=False)
    sizes = list[tuple[bool, bool]]()

    async def play() -> None:
        for _ in range(2):
            await one_after_another(engine, asked_for(5, 6, 7))
            sizes.append((bool(engine.passes.prompts.graphs.sizes), bool(engine.passes.steps.graphs.sizes)))
            await engine.attach(Elsewhere(carries, {name: each.clone() for name, each in live_tensors(module)}))
            if carries == "full":
                await engine.load(1)
            sizes.append((bool(engine.passes.prompts.graphs.sizes), bool(engine.passes.steps.graphs.sizes)))

    finish(engine, play)
    assert sizes == [(True, True), (False, False)] * 2


def test_a_prompt_alone_takes_no_more_of_the_cache_than_it_fills(monkeypatch: pytest.MonkeyPatch):
    """The cache doubles at the widths: a prompt of 70 tokens is 128 wide, and does not need a 129th position."""
    reserve, asked = KvCache.reserve, list[int]()
    monkeypatch.setattr(KvCache, "reserve", lambda self, *of: (asked.append(of[1]), reserve(self, *of)))
    engine = make_engine("inline", ARCHITECTURES["llama-gqa"](), max_running=6, eager=False)
    finish(engine, lambda: one_after_another(engine, asked_for(40, 41, 42, 70)))
    assert max(asked) == 128
