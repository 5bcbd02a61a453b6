"""Many LoRA adapters behind one base, as `tandem serve --adapter` has them: `python benchmarks/gpu/adapters.py hf`.

The base has random weights of a released model's shape; the adapters are random too, over all its linear layers.
Decode: streams start together, each kind of batch in turn, several rounds. A step is the time of all answers beyond
that of answers a quarter as long, by token; its share is of the batch on the base alone. `in turn`: row after row has
the next adapter. `by chance`: each row has one drawn at random, so some have many rows and some have none. First
token of a cold adapter: its files are written, flushed and dropped from the page cache; the time is from the reading
of them until a request's first token; digests of what was read and of what the engine holds are part of it. A warm
one is loaded already. Nothing else runs meanwhile. The embedded engine computes in float32, vLLM in bfloat16. Numbers
go to $OUT/adapters-ENGINE.json.

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

from common import note, table
from tandem.build import standalone_engines
from tandem.recipes.adapter_table import AdapterTable
from tandem.recipes.serve import load_model
from tandem.spec.engine import HfEngineSpec, VllmEngineSpec
from tandem.types import Sampling

LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def write_adapter(path: Path, checkpoint: Path, rank: int, seed: int, device: str) -> None:
    """Write an adapter as PEFT does, in float32, and drop its files from the page cache."""
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
    for file in path.iterdir():
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


async def decode(measured: Measured, streams: int, rounds: int) -> list[dict[str, Any]]:
    names, drawn = sorted(measured.adapters.models), random.Random(0)
    kinds = {
        "base alone": [""] * streams, "one adapter": names[:1] * streams,
        "in turn": [names[row % len(names)] for row in range(streams)],
        "by chance": [drawn.choice(names) for _ in range(streams)],
    }  # fmt: skip
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number, (kind, rows) in itertools.product(range(rounds + 1), kinds.items()):
        found = await measured.step_s(rows)
        if number:  # the first round warms up
            seconds[kind].append(found)
    base = statistics.median(seconds["base alone"])
    return [
        {
            "streams": streams, "adapters": kind, "step_ms": 1000 * statistics.median(found),
            "tokens_per_s": streams / statistics.median(found), "of_base": base / statistics.median(found),
        }
        for kind, found in seconds.items()
    ]  # fmt: skip


async def first_tokens(measured: Measured, cold: list[Path]) -> dict[str, list[float]]:
    """Return milliseconds: the files of each adapter read and loaded, the first token after it, and a warm one's."""
    found: dict[str, list[float]] = {"loaded": [], "cold": [], "warm": []}
    for number, path in enumerate(cold):
        began = time.perf_counter()
        await measured.adapters.put(path.name, str(path))
        loaded = time.perf_counter() - began
        first = await measured.first_token_s(path.name)
        if number:  # the first one warms up
            found["loaded"].append(1000 * loaded)
            found["cold"].append(1000 * (loaded + first))
            found["warm"].append(1000 * await measured.first_token_s(path.name))
        await measured.engine.drop_adapter(path.name)
    return found


async def measure(engine: Any, num_ids: int, options: argparse.Namespace, home: Path) -> dict[str, Any]:
    paths = [home / f"adapter{number}" for number in range(options.adapters + options.cold + 1)]
    for number, path in enumerate(paths):
        write_adapter(path, options.checkpoint, options.rank, number, options.device)
    served, cold = paths[: options.adapters], paths[options.adapters :]
    adapters, began = AdapterTable([], [f"{path.name}={path}" for path in served], None), time.perf_counter()
    await adapters.begin(engine)
    found: dict[str, Any] = {"load_all_s": time.perf_counter() - began}
    measured = Measured(engine, adapters, num_ids, options)
    rows = list[dict[str, Any]]()
    for streams in options.streams:
        rows += await decode(measured, streams, options.rounds)
    found |= {"decode": rows, "first_token_ms": await first_tokens(measured, cold)}
    await engine.close()
    return found


def load_hf(options: argparse.Namespace, _: Path) -> tuple[Any, int]:
    spec = HfEngineSpec(max_running=max(options.streams), kv_gib=options.kv_gib)
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
    asked.add_argument("--prompt", type=int, default=64)
    asked.add_argument("--tokens", type=int, default=48)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--cold", type=int, default=5)
    asked.add_argument("--kv-gib", type=float, default=24.0, help="of hf")
    asked.add_argument("--share", type=float, default=0.6, help="of the GPU's memory, for vLLM")
    asked.add_argument("--python", default=standalone_engines.default_python(), help="vLLM's interpreter")
    options = asked.parse_args()
    began = time.perf_counter()
    options.checkpoint = checkpoint_of(options)
    note(
        f"{options.engine}: {options.adapters} adapters of rank {options.rank} on every linear layer of "
        f"{options.checkpoint.name}"
    )
    with tempfile.TemporaryDirectory() as home:
        engine, num_ids = (load_hf if options.engine == "hf" else start_vllm)(options, Path(home))
        started = time.perf_counter() - began
        found = asyncio.run(measure(engine, num_ids, options, Path(home)))
    found |= {"engine": options.engine, "started_s": started, "seconds": time.perf_counter() - began}
    (Path(os.environ.get("OUT", ".")) / f"adapters-{options.engine}.json").write_text(json.dumps(found, indent=1))
    table(
        ["streams", "adapters of the rows", "ms a step", "tokens/s", "of the base's"],
        [
            [str(row["streams"]), row["adapters"], f"{row['step_ms']:.2f}", f"{row['tokens_per_s']:,.0f}",
             f"{row['of_base']:.3f}"]
            for row in found["decode"]
        ],
    )  # fmt: skip
    firsts = {kind: f"{statistics.median(ms):.1f}, most {max(ms):.1f}" for kind, ms in found["first_token_ms"].items()}
    print()
    table(["first token, ms", ""], [[kind, text] for kind, text in firsts.items()])
    print(
        f"\nstarted in {started:.0f} s; {options.adapters} adapters loaded in {found['load_all_s']:.1f} s; "
        f"{found['seconds']:.0f} s in all"
    )


if __name__ == "__main__":
    main()
