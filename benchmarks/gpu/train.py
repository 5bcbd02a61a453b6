"""How fast a step trains: `python benchmarks/gpu/train.py optimizer sft-0.6b sft-8b`.

`optimizer`: the update of 1.7B bf16 weights with `split` by AdamW, beside torch's fused AdamW on as many fp32 weights.
`sft-*`: packed sequences of 200 to 2,000 tokens through PolicyTrainer, as a run does it, with its rows masked, packed,
and packed with compiled layers. MFU counts 6 operations a weight and token, and attention's own, against 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numerics import fresh, make_policy, make_trainer

from tandem.algo import sft
from tandem.model.policy import CausalPolicy
from tandem.ops.byte_sizes import Shares, shares_masked, shares_unmasked
from tandem.optim.adamw import AdamW
from tandem.optim.optimizer import Optimizer
from tandem.spec.optim import AdamWSpec
from tandem.train.batch_packing import make_batch
from tandem.types import Trajectory

PEAK_FLOPS = 989e12


def timed(work: Any, repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def updated(ours: Optimizer, grads: dict[str, torch.Tensor]) -> None:
    ours.update(dict(grads), 1e-5, 1.0)
    ours.drain_metrics()


def optimizer() -> dict[str, Any]:
    fresh()
    policy, split = make_policy("1.7B")
    named = policy.trainable()
    count = sum(tensor.numel() for _, tensor in named)
    grads = {name: torch.randn(tensor.shape, device="cuda", dtype=tensor.dtype) for name, tensor in named}
    ours = Optimizer(named, dict.fromkeys(dict(named), AdamW(AdamWSpec())), split)
    mine = timed(partial(updated, ours, grads), 10)
    del ours, policy, split, grads, named
    fresh()
    policy, _ = make_policy("1.7B")
    wide = [torch.nn.Parameter(tensor.detach().float()) for _, tensor in policy.trainable()]
    del policy
    for tensor in wide:
        tensor.grad = torch.randn_like(tensor)
    theirs = torch.optim.AdamW(wide, lr=1e-5, fused=True)
    peer = timed(theirs.step, 10)
    return {"numbers": count, "ms": mine * 1e3, "torch_ms": peer * 1e3, "ratio": mine / peer,
            "gb_s": count * 26 / mine / 1e9}  # fmt: skip


def batch(tokens: int, micro_tokens: int, seed: int, shares: Shares) -> tuple[Any, list[int]]:
    rng = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(rng.randint(200, 2000), max(200, tokens - sum(lengths))))
    groups = []
    for length in lengths:
        ids = [rng.randrange(151000) for _ in range(length)]
        groups.append([Trajectory(ids, [False] + [True] * (length - 1), [0.0] * length, [-1] * length)])
    groups[0][0].ids.extend([5] * (4096 - len(groups[0][0].ids)))  # rows of 4,096
    first = groups[0][0]
    groups[0] = [Trajectory(first.ids, [False] + [True] * 4095, [0.0] * 4096, [-1] * 4096)]
    lengths[0] = 4096
    made = make_batch(
        groups, sft.make(), micro_tokens=micro_tokens, version=0, shares=shares, device=torch.device("cuda")
    )
    return made, lengths


def flops(policy: CausalPolicy, lengths: list[int]) -> float:
    config = policy.module.config
    table = policy.module.get_input_embeddings().weight.numel()
    weights = sum(tensor.numel() for _, tensor in policy.trainable()) - (0 if config.tie_word_embeddings else table)
    attention = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers / 2
    return 6 * weights * sum(lengths) + 3 * attention * sum(length**2 for length in lengths)


def sft_row(shape: str, way: str, asked: argparse.Namespace) -> dict[str, Any]:
    fresh()
    started = time.perf_counter()
    policy, split = make_policy(shape, asked.activations, packed=way != "masked", compiled=way == "compiled")
    ready = time.perf_counter() - started
    trainer = make_trainer(policy, split, asked.optimizer, release=False)
    shares = shares_masked(policy.module.config.hidden_size) if way == "masked" else shares_unmasked
    found, losses = [], []
    for number in range(asked.steps + 2):
        made, lengths = batch(asked.tokens, asked.micro_tokens, number, shares)
        torch.cuda.synchronize()
        started = time.perf_counter()
        metrics = trainer.step(made)
        losses.append(metrics["loss/total"])
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started, sum(lengths), flops(policy, lengths)))
    first = found[0][0]
    seconds, count, work = (statistics.median(each) for each in zip(*found[2:], strict=True))
    return {
        "shape": shape, "way": way, "tokens_s": count / seconds, "mfu": work / seconds / PEAK_FLOPS, "step_s": seconds,
        "tokens": count, "micro_tokens": asked.micro_tokens, "optimizer": asked.optimizer,
        "activations": asked.activations, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "memory": {name: value for name, value in metrics.items() if "memory" in name}, "ready_s": ready,
        "first_s": first, "losses": losses,
        "masked": policy.forward.why_masked, "compiled": policy.forward.why_not_compiled,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="+")
    parser.add_argument("--ways", nargs="+", default=["masked", "packed", "compiled"])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--activations", default="keep")
    parser.add_argument("--optimizer", default="adamw")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for what in arguments.what:
        if what == "optimizer":
            row = optimizer()
            print(
                f"optimizer 1.7B: {row['ms']:.1f} ms, torch {row['torch_ms']:.1f} ms, {row['ratio']:.2f}x", flush=True
            )
            found.append({"what": what, **row})
            continue
        for way in arguments.ways:
            shape = what.removeprefix("sft-").upper()
            try:
                row = sft_row(shape, way, arguments)
            except torch.OutOfMemoryError as error:
                print(f"{what} {way}: {str(error)[:200]}", flush=True)
                continue
            print(
                f"{what} {way:9} {row['tokens_s']:8.0f} tokens/s, MFU {row['mfu']:.1%}, step {row['step_s']:.3f} s, "
                f"peak {row['peak_gib']:.1f} GiB, ready {row['ready_s']:.0f} s, first {row['first_s']:.1f} s, "
                f"loss {row['losses'][-1]:.4f}; {row['masked']} | {row['compiled']}",
                flush=True,
            )
            found.append({"what": what, **row})
    Path(os.environ.get("OUT", "."), "train.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
