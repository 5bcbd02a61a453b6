"""Many LoRA adapters behind one base, as `tandem serve --adapter` has them: `python benchmarks/gpu/adapters.py hf`.

The base has random weights of a released model's shape; the adapters are random too, over all its linear layers.
Decode: streams start together, each kind of batch in turn, several rounds. A step is the time of all answers beyond
that of answers a quarter as long, by token; its share is of the batch on the base alone. `in turn`: row after row has
the next adapter. `by chance`: each row has one drawn at random, so some have many rows and some have none. First
token of a cold adapter: its files are written, flushed and dropped from the page cache; the time is from the reading
of them until a request's first token; digests of what was read and of what the engine holds are part of it. A warm
one is loaded already. Nothing else runs meanwhile. Both engines compute in bfloat16 on a GPU. Numbers go to
$OUT/adapters-ENGINE.json.

python benchmarks/gpu/adapters.py hf|vllm [--shape qwen3-1.7b] [--streams 64 256] [--device cuda]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import save_file
from standing import ask_for_checkpoint, checkpoint_of

from common import note
from tandem.build import standalone_engines
from tandem.io.file_system import memory_backed
from tandem.recipes.adapter_table import AdapterTable
from tandem.recipes.serve import load_model
from tandem.spec.engine import HfEngineSpec, VllmEngineSpec
from tandem.types import Sampling

LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def write_adapter(path: Path, checkpoint: Path, rank: int, seed: int, device: str, *, is_cold: bool) -> None:
    """Write an adapter as PEFT does, in float32. `is_cold`: flush its files, and drop them from the page cache."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    sizes = dict(zip(LAYERS, ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)), strict=True))
    sizes |= dict(zip(MLP, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True))
    generator = torch.Generator(device).manual_seed(seed)

    def values(rows: int, cols: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, cols, device=device, generator=generator) * scale).cpu()

    tensors = dict[str, torch.Tensor]()
    for layer, (name, (inputs, outputs)) in itertools.product(range(config["num_hidden_layers"]), sizes.items()):
        owner = f"base_model.model.model.layers.{layer}.{name}"
        tensors[f"{owner}.lora_A.weight"] = values(rank, inputs, inputs**-0.5)
        tensors[f"{owner}.lora_B.weight"] = values(outputs, rank, 0.01)
    path.mkdir(parents=True)
    modules = sorted(name.rpartition(".")[2] for name in sizes)
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules}
    (path / "adapter_config.json").write_text(json.dumps(told))
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    for file in path.iterdir() if is_cold else ():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Measured:
    """An engine that serves adapters, and the names that it can be asked for."""

    def __init__(self, engine: Any, adapters: AdapterTable, num_ids: int, options: argparse.Namespace) -> None:
        self.engine, self.adapters, self.options = engine, adapters, options
        self.num_ids, self.asked = num_ids, 0

    async def ask(self, adapter: str, tokens: int, told: Callable[..., None]) -> None:
        """No prompt is asked twice, so that nothing is found in a cache."""
        self.asked += 1
        drawn = random.Random(self.asked)
        prompt = [drawn.randrange(300, self.num_ids - 1) for _ in range(self.options.prompt)]
        model = self.adapters.models[adapter] if adapter else self.engine
        sampling = Sampling(tokens, temperature=1.0, seed=self.asked)
        await model.generate(prompt, sampling, on_token=told)

    async def step_s(self, names: list[str]) -> float:
        """Return the time of a decode step of a batch whose rows have these adapters."""
        few, many = self.options.tokens // 4, self.options.tokens
        seconds = [await self.whole_s(names, tokens) for tokens in (few, many)]
        return (seconds[1] - seconds[0]) / (many - few)

    async def whole_s(self, names: list[str], tokens: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(self.ask(name, tokens, lambda *_: None) for name in names))
        return time.perf_counter() - began

    async def first_token_s(self, adapter: str) -> float:
        began, first = time.perf_counter(), list[float]()
        await self.ask(adapter, 2, lambda *_: first.append(time.perf_counter()))
        return first[0] - began


class Figures:
    """What is known so far: each line is printed, and the file written, at once."""

    def __init__(self, engine: str) -> None:
        self.file = Path(os.environ.get("OUT", ".")) / f"adapters-{engine}.json"
        self.began, self.found = time.perf_counter(), list[dict[str, Any]]()

    def add(self, what: str, **figures: Any) -> None:
        self.found.append({"what": what, "at_s": round(time.perf_counter() - self.began, 1), **figures})
        self.file.write_text(json.dumps(self.found, indent=1))
        told = ", ".join(f"{name} {each:,.3f}" for name, each in figures.items())
        print(f"{self.found[-1]['at_s']:6.1f} s  {what}: {told}", flush=True)


async def decode(measured: Measured, figures: Figures, streams: int, rounds: int) -> None:
    names, drawn = sorted(measured.adapters.models), random.Random(0)
    kinds = {
        "base alone": [""] * streams, "in turn": [names[row % len(names)] for row in range(streams)],
        "by chance": [drawn.choice(names) for _ in range(streams)],
    }  # fmt: skip
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number, (kind, rows) in itertools.product(range(rounds + 1), kinds.items()):
        found = await measured.step_s(rows)
        if number:  # the first round warms up
            seconds[kind].append(found)
        name = f"{streams} streams, {kind}, {f'round {number}' if number else 'warming up'}"
        figures.add(name, step_ms=1000 * found, tokens_per_s=streams / found)
    base = statistics.median(seconds["base alone"])
    for kind, each in seconds.items():
        figures.add(f"{streams} streams, {kind}", of_base=base / statistics.median(each))


async def first_tokens(measured: Measured, figures: Figures, cold: list[Path]) -> None:
    """Tell milliseconds: an adapter's files read and loaded; the first token, that included; a warm one's."""
    for number, path in enumerate(cold):
        began = time.perf_counter()
        await measured.adapters.put(path.name, str(path))
        loaded = time.perf_counter() - began
        first = await measured.first_token_s(path.name)
        warm = await measured.first_token_s(path.name)
        name = f"first token, {f'adapter {number}' if number else 'warming up'}"
        figures.add(name, loaded_ms=1000 * loaded, cold_ms=1000 * (loaded + first), warm_ms=1000 * warm)
        await measured.engine.drop_adapter(path.name)


async def measure(engine: Any, num_ids: int, options: argparse.Namespace, home: Path, figures: Figures) -> None:
    with tempfile.TemporaryDirectory(dir=memory_backed()) as quick:
        served = [Path(quick) / f"adapter{number}" for number in range(options.adapters)]
        cold = [home / f"cold{number}" for number in range(options.cold + 1)]
        for number, path in enumerate([*served, *cold]):
            write_adapter(path, options.checkpoint, options.rank, number, options.device, is_cold=path in cold)
        figures.add("adapters written", number=len(served) + len(cold))
        adapters = AdapterTable([], [f"{path.name}={path}" for path in served], None)
        await adapters.begin(engine)
    figures.add("adapters loaded", number=len(served))
    measured = Measured(engine, adapters, num_ids, options)
    for streams in options.streams:
        await decode(measured, figures, streams, options.rounds)
    await first_tokens(measured, figures, cold)
    await engine.close()


def load_hf(options: argparse.Namespace, _: Path) -> tuple[Any, int]:
    eager = True if options.eager else "auto"
    spec = HfEngineSpec(max_running=max(options.streams), kv_gib=options.kv_gib, eager=eager)
    model, engine = load_model(str(options.checkpoint), 0, spec, thinking=False, inline=False)
    return engine, model.num_ids


def start_vllm(options: argparse.Namespace, home: Path) -> tuple[Any, int]:
    spec = VllmEngineSpec(
        python=options.python, memory_share=options.share, max_running=max(options.streams),
        max_context=options.prompt + options.tokens + 8,
    )  # fmt: skip
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    how = standalone_engines.vllm_options(
        spec, device=options.device, dtype=dtype, adapter_slots=options.adapters + 1, max_rank=options.rank
    )
    alone = standalone_engines.vllm_alone(spec, str(options.checkpoint), home, how, version=0, thinking=False)
    return alone.engine, alone.num_ids


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("engine", choices=["hf", "vllm"])
    ask_for_checkpoint(asked, "qwen3-1.7b")
    asked.add_argument("--adapters", type=int, default=32)
    asked.add_argument("--rank", type=int, default=16)
    asked.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    asked.add_argument("--prompt", type=int, default=16)
    asked.add_argument("--tokens", type=int, default=256)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--cold", type=int, default=4)
    asked.add_argument("--kv-gib", type=float, default=24.0, help="of hf")
    asked.add_argument("--eager", action="store_true", help="hf: no CUDA graphs")
    asked.add_argument("--share", type=float, default=0.6, help="of the GPU's memory, for vLLM")
    asked.add_argument("--python", default=standalone_engines.default_python(), help="vLLM's interpreter")
    options = asked.parse_args()
    note(f"{options.engine}: {options.adapters} adapters of rank {options.rank} on every linear layer")
    figures = Figures(options.engine)
    options.checkpoint = checkpoint_of(options)
    figures.add(f"checkpoint {options.checkpoint.name} is there")
    with tempfile.TemporaryDirectory() as home:
        engine, num_ids = (load_hf if options.engine == "hf" else start_vllm)(options, Path(home))
        figures.add("the engine is there")
        asyncio.run(measure(engine, num_ids, options, Path(home), figures))


if __name__ == "__main__":
    main()
