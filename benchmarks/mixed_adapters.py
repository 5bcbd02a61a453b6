"""Decode a batch whose rows have different LoRA adapters: `python benchmarks/mixed_adapters.py`.

The embedded engine on a CPU, with 32 adapters of one base. Each batch is decoded with the base alone, with one adapter
for all rows, and with a different adapter in each row, in turn, so that noise of the machine falls on all alike. A
figure is the time of a decode step; the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from common import note, table
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.ops.digest import fingerprints
from tandem.types import Sampling

SIZES = {"256 wide, 4 layers": (256, 768, 4, 4), "576 wide, 30 layers": (576, 1536, 30, 9)}
"""Hidden width, width of the MLP, layers, heads. The second is SmolLM2-135M's."""


def make(hidden: int, inner: int, layers: int, heads: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 3), max_position_embeddings=1024,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def adapter(module: Any, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return matrices for every linear layer but the head."""
    torch.manual_seed(seed)
    tensors = dict[str, torch.Tensor]()
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            owner = f"base_model.model.{name}"
            tensors[f"{owner}.lora_A.weight"] = torch.randn(rank, layer.in_features) / layer.in_features**0.5
            tensors[f"{owner}.lora_B.weight"] = torch.randn(layer.out_features, rank) * 0.01
    return tensors


async def measure(size: tuple[int, int, int, int], options: argparse.Namespace) -> dict[str, float]:
    module = make(*size)
    engine = EmbeddedEngine(module, num_ids=4096, end_ids=frozenset(), decode=str, kv_gib=1.0)
    engine.version = 0
    for number in range(options.adapters):
        tensors = adapter(module, options.rank, number)
        await engine.put_adapter(f"a{number}", tensors, {"r": options.rank}, fingerprints(tensors))

    async def decode(adapter_of: Callable[[int], str]) -> float:
        """Return the seconds of a step, from the second token of all rows to the last."""
        times = list[float]()

        def told(_id: int, _logprob: float, _version: int) -> None:
            times.append(time.perf_counter())

        sampling = Sampling(options.tokens)
        await asyncio.gather(
            *(
                engine.generate([row + 1] * 16, sampling, on_token=told, adapter=adapter_of(row))
                for row in range(options.adapters)
            )
        )
        # A step tells one token of every row.
        steps = times[:: options.adapters]
        return statistics.median(after - before for before, after in itertools.pairwise(steps[1:]))

    kinds: dict[str, Callable[[int], str]] = {
        "base": lambda row: "", "one adapter": lambda row: "a0", "each its own": lambda row: f"a{row}",
        "half of them": lambda row: f"a{row}" if row % 2 else "",
    }  # fmt: skip
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind, adapter_of in kinds.items():
            seconds[kind].append(await decode(adapter_of))
    await engine.close()
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--adapters", type=int, default=32)
    asked.add_argument("--rank", type=int, default=8)
    asked.add_argument("--tokens", type=int, default=12)
    asked.add_argument("--rounds", type=int, default=6)
    asked.add_argument("--threads", type=int, default=1)
    options = asked.parse_args()
    torch.set_num_threads(options.threads)
    note(f"{options.adapters} rows, {options.adapters} adapters of rank {options.rank} on every linear layer")
    rows = list[list[str]]()
    for name, size in SIZES.items():
        found = asyncio.run(measure(size, options))
        rows += [[name, kind, f"{value * 1000:.1f}", f"{value / found['base']:.2f}"] for kind, value in found.items()]
    table(["model", "adapters of the rows", "ms a step", "of the base's"], rows)


if __name__ == "__main__":
    main()
