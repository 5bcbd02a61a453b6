"""Memory and correctness of full fine-tuning on one GPU: `python benchmarks/gpu/numerics.py [--only 8b,1.7b,release]`.

Random weights of the real shapes. Peaks are the allocator's; the accounting is what a run reports as `memory/*`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import note, table
from tandem.algo import sft
from tandem.build import optimizers
from tandem.model.cast_precision import narrow
from tandem.model.policy import CausalPolicy
from tandem.ops.byte_sizes import shares_never
from tandem.optim.master_weights import SplitMaster
from tandem.spec.optim import OptimizerSpec
from tandem.train.batch_packing import make_batch
from tandem.train.trainer import PolicyTrainer
from tandem.types import Trajectory

GB = 1e9
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B, 4 layers": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "tie": True},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "tie": True, "heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "tie": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "tie": False},
}


class Vocabulary:
    """All that a policy asks of a tokenizer before it is exported."""

    def __len__(self) -> int:
        return 151936


def make_policy(
    shape: str, activations: Any = "keep", seed: int = 0, *, packed: bool = False, compiled: bool = False
) -> tuple[CausalPolicy, SplitMaster]:
    sizes = dict(SHAPES[shape])
    tie = sizes.pop("tie")
    heads = sizes.pop("heads", sizes["hidden_size"] // 128)
    config = Qwen3Config(
        vocab_size=151936, head_dim=128, num_attention_heads=heads, num_key_value_heads=8, tie_word_embeddings=tie,
        max_position_embeddings=40960, dtype="bfloat16", bos_token_id=None, eos_token_id=None, pad_token_id=None,
        **sizes,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # 8B in fp32 is more than the step is to take
    try:
        with torch.device("cuda"):
            module = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    split = SplitMaster()
    narrow(module, torch.device("cuda"), lambda name, exact: split.adopt(name, exact.float()))
    return CausalPolicy(module, Vocabulary(), activations=activations, packed=packed, compiled=compiled), split


def make_trainer(
    policy: CausalPolicy, split: SplitMaster, kind: str, *, release: bool, clip_norm: float = 1.0
) -> PolicyTrainer:
    spec: Any = TypeAdapter(OptimizerSpec).validate_python({"kind": kind})
    named, tables = policy.trainable(), policy.tables()
    optimizer = optimizers.optimizer(named, spec, master=split, tables=tables, lora_plus=1.0, seed=0)
    return PolicyTrainer(policy, sft.make(), optimizer, lr=lambda step: 1e-5, clip_norm=clip_norm, release=release)


def make_step(sequences: int, length: int, seed: int) -> Any:
    rng = random.Random(seed)
    groups = []
    for _ in range(sequences):
        ids = [rng.randrange(151936) for _ in range(length)]
        groups.append([Trajectory(ids, [False] + [True] * (length - 1), [0.0] * length, [-1] * length)])
    return make_batch(
        groups, sft.make(), micro_tokens=sequences * length, version=0, shares=shares_never, device=torch.device("cuda")
    )


def steps(trainer: PolicyTrainer, count: int, sequences: int, length: int, same: bool = True) -> list[dict[str, float]]:
    found = []
    for number in range(count):
        batch = make_step(sequences, length, 0 if same else number)
        torch.cuda.synchronize()
        started = time.perf_counter()
        metrics = trainer.step(batch)
        torch.cuda.synchronize()
        found.append({**metrics, "seconds": time.perf_counter() - started})
    return found


def fresh() -> None:
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def eight_billion() -> dict[str, Any]:
    fresh()
    policy, split = make_policy("8B", "recompute")
    made_gb = torch.cuda.max_memory_allocated() / GB
    trainer = make_trainer(policy, split, "apollo_mini", release=True)
    torch.cuda.reset_peak_memory_stats()
    found = steps(trainer, 3, 1, 4096)
    peak_gb = torch.cuda.max_memory_allocated() / GB
    return {
        "made_gb": made_gb, "peak_gb": peak_gb, "losses": [each["loss/total"] for each in found],
        "seconds": [each["seconds"] for each in found],
        **{key: value for key, value in found[-1].items() if "/" in key},
    }  # fmt: skip


def release_against_plain() -> dict[str, Any]:
    losses = {}
    for release in (False, True):
        fresh()
        policy, split = make_policy("0.6B, 4 layers")
        trainer = make_trainer(policy, split, "apollo_mini", release=release, clip_norm=1e9)
        losses[release] = [each["loss/total"] for each in steps(trainer, 20, 4, 512)]
    return {
        "plain": losses[False], "released": losses[True],
        "largest_gap": max(abs(a - b) for a, b in zip(losses[False], losses[True], strict=True)),
    }  # fmt: skip


def accounting(activations: str, sequences: int, length: int) -> dict[str, Any]:
    fresh()
    policy, split = make_policy("1.7B", activations)
    weights_gib = torch.cuda.memory_allocated() / 2**30  # weights and low bits
    trainer = make_trainer(policy, split, "adamw", release=False)
    static_gib = torch.cuda.memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    found = steps(trainer, 3, sequences, length)[-1]
    parts = {key.removeprefix("memory/"): value for key, value in found.items() if key.startswith("memory/")}
    # Measured by the allocator, phase by phase, beside what is accounted.
    batch = make_step(sequences, length, 0)
    before = torch.cuda.memory_allocated()
    with torch.enable_grad():
        scored = policy.logprobs(batch.micro[0], 1.0)
        activations_gib = (torch.cuda.memory_allocated() - before) / 2**30
        torch.cuda.reset_peak_memory_stats()
        at_backward = torch.cuda.memory_allocated()
        loss, _ = sft.make().loss(scored, batch.micro[0], batch.totals)
        loss.backward()
    backward_extra_gib = (torch.cuda.max_memory_allocated() - at_backward) / 2**30
    gradients_gib = (
        sum(t.grad.numel() * t.grad.element_size() for _, t in policy.trainable() if t.grad is not None) / 2**30
    )
    return {
        "activations_policy": activations, "tokens": sequences * length, "seconds": found["seconds"], "parts": parts,
        "measured": {
            "weights+master": weights_gib, "optimizer": static_gib - weights_gib, "activations": activations_gib,
            "gradients": gradients_gib, "backward_beyond_activations": backward_extra_gib,
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="8b,1.7b,release")
    parser.add_argument("--out", type=Path)
    chosen = (options := parser.parse_args()).only.split(",")
    results: dict[str, Any] = {}
    if "release" in chosen:
        results["release"] = release_against_plain()
        print("release against plain, largest loss gap over 20 steps:", results["release"]["largest_gap"], flush=True)
    if "1.7b" in chosen:
        results["1.7b"] = [
            accounting("keep", 4, 2048),
            accounting("recompute", 8, 2048),
            accounting("selective", 4, 2048),
        ]
        for each in results["1.7b"]:
            print(json.dumps(each), flush=True)
    if "8b" in chosen:
        results["8b"] = eight_billion()
        print(json.dumps(results["8b"]), flush=True)
    note(f"{torch.cuda.get_device_name()}, seed 0, random weights, Qwen3 shapes")
    if "1.7b" in results:
        table(
            ("1.7B, split + AdamW", "tokens", "accounted GiB", "peak GiB", "off by"),
            [
                (
                    each["activations_policy"], str(each["tokens"]), f"{each['parts'].get('accounted', 0):.2f}",
                    f"{each['parts']['peak']:.2f}",
                    f"{abs(each['parts'].get('accounted', 0) / each['parts']['peak'] - 1):.1%}",
                )
                for each in results["1.7b"]
            ],
        )  # fmt: skip
    if "8b" in results:
        found = results["8b"]
        table(
            ("8B, split + apollo_mini + release", "value"),
            [("peak GB", f"{found['peak_gb']:.1f}"), ("seconds a step, 4,096 tokens", f"{found['seconds'][-1]:.2f}")],
        )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "numerics.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
