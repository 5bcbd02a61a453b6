"""Hybrids: rows of several sequences against a row for each, forward and backward, side by side in one process.

python benchmarks/hybrids.py [--device cuda] [--only Qwen3.5 LFM2]

`answers`: four prompts with 16 answers each, as RL trains them. `conversations`: as in benchmarks/packing.py. A row for
each sequence is how a model is trained that Tandem cannot engage for shared rows.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import packing
from common import note, table
from tandem.algo import sft
from tandem.model.policy import CausalPolicy
from tandem.ops import recurrent_layers
from tandem.ops.byte_sizes import Shares, shares_masked, shares_never, shares_unmasked
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.types import Batch, Group, Trajectory

ROUNDS = 3
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
LARGE = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 12, "num_attention_heads": 8}
DELTA = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "LFM2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2},
             {"layer_types": ["conv", "conv", "full_attention"] * 4}),
    "Qwen3.5": ("Qwen3_5TextConfig", {"head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
                                      "linear_key_head_dim": 32, "linear_value_head_dim": 32},
                {"head_dim": 256, **DELTA}),
    "Qwen3-Next": ("Qwen3NextConfig",
                   {"head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
                    "linear_value_head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
                   {"head_dim": 256, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
                    "shared_expert_intermediate_size": 512, **DELTA}),
}  # fmt: skip


def answers(seed: int) -> list[Group]:
    rng = random.Random(seed)
    groups: list[Group] = []
    for _ in range(4):
        prompt = [rng.randrange(256) for _ in range(rng.randrange(120, 400))]
        lengths = [rng.randrange(40, 160) for _ in range(16)]
        groups.append([_row(prompt, [rng.randrange(256) for _ in range(each)]) for each in lengths])
    return groups


def _row(prompt: list[int], answer: list[int]) -> Trajectory:
    ids, trained = prompt + answer, [False] * len(prompt) + [True] * len(answer)
    return Trajectory(ids, trained, [0.0] * len(ids), [-1 if not each else 0 for each in trained])


@contextmanager
def each_alone() -> Iterator[None]:
    ours = recurrent_layers.share_rows
    recurrent_layers.share_rows = lambda config: False
    try:
        yield
    finally:
        recurrent_layers.share_rows = ours


def batch(groups: Sequence[Group], shares: Shares, device: str) -> Batch:
    return make_batch(groups, sft.make(), micro_tokens=8192, version=0, shares=shares, device=torch.device(device))


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--device", default="cpu")
    given.add_argument("--only", nargs="*", default=list(FAMILIES))
    args = given.parse_args()
    rows: list[list[str]] = []
    for row in (row for name in args.only for row in measured(name, args.device)):
        print(*row, sep=", ", file=sys.stderr, flush=True)
        rows.append(row)
    note(f"hybrids on {args.device}; forward and backward, {ROUNDS} rounds, medians of a round's ratio")
    table(("model", "work", "a row each, tokens/s", "shared rows", "ratio", "largest gradient gap", "attention"), rows)


def small_hybrid(name: str) -> Any:
    kind, small, _ = FAMILIES[name]
    return _made(_config(kind, {**SMALL, **small}), torch.float32)


def large_hybrid(name: str) -> Any:
    return _made(hybrid_config(name), torch.bfloat16)


def hybrid_config(name: str, **sizes: int) -> Any:
    """Return the config of a large hybrid, or of one with other sizes."""
    kind, _, large = FAMILIES[name]
    given = {**LARGE, **large, **sizes}
    if kinds := given.get("layer_types"):
        given["layer_types"] = [kinds[number % len(kinds)] for number in range(given["num_hidden_layers"])]
    return _config(kind, given)


def _config(kind: str, sizes: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, kind)(**sizes, num_key_value_heads=2, vocab_size=512, tie_word_embeddings=True)


def _made(config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def measured(name: str, device: str) -> Iterator[list[str]]:
    module = small_hybrid(name) if device == "cpu" else large_hybrid(name).to(device)
    policy = CausalPolicy(module, byte_tokenizer(), packed=device != "cpu")
    policy.check_gradient()  # as a run does: torch computes what kernels compute no gradient of
    forward = policy.forward
    assert forward.is_recurrent, forward.why_alone
    if forward.why_in_torch:
        note(f"{name}: torch computes the recurrent layers: {forward.why_in_torch}")
    shares = shares_unmasked if forward.shares_freely else shares_masked(module.config.hidden_size)
    for work, make in (("conversations", packing.conversations), ("answers", answers)):
        taken: dict[str, list[float]] = {"alone": [], "shared": []}
        gaps: list[float] = []
        for seed in range(1 + ROUNDS):
            groups = make(seed)
            found = {}
            for way in taken:
                made = batch(groups, shares_never if way == "alone" else shares, device)
                _wait(device)
                started = time.perf_counter()
                if way == "alone":
                    masked, forward.why_masked = forward.why_masked, "a row for each sequence"
                    with each_alone():
                        found[way] = packing.gradients(policy, made)
                    forward.why_masked = masked
                else:
                    found[way] = packing.gradients(policy, made)
                _wait(device)
                taken[way].append(time.perf_counter() - started)
                print(f"{name}, {work}, {way}: {taken[way][-1]:.2f} s", file=sys.stderr, flush=True)
            norm = torch.stack([each.norm() for each in found["alone"].values()]).norm()
            off = [found["shared"][key].float() - found["alone"][key].float() for key in found["alone"]]
            gaps.append(float(torch.stack([each.norm() for each in off]).norm() / norm))
        tokens = sum(len(row.ids) for seed in range(1, 1 + ROUNDS) for group in make(seed) for row in group)
        speeds = {way: tokens / sum(seconds[1:]) for way, seconds in taken.items()}  # the first round compiles kernels
        ratio = statistics.median(a / b for a, b in zip(taken["alone"][1:], taken["shared"][1:], strict=True))
        attention = "packed" if forward.shares_freely else forward.why_masked
        yield [name, work, *(f"{each:,.0f}" for each in speeds.values()), f"{ratio:.2f}", f"{max(gaps):.1e}", attention]


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
