"""A step of GRPO as a user would run it: `python benchmarks/gpu/steps.py shared --shape qwen3-1.7b`.

Random weights of the shape, with a vocabulary of Qwen's size; vLLM behind `tandem engine serve`, on the same GPU or on
others (`--gpus 1`); 32 groups of 8 answers of up to 512 tokens a step. Of the run's own metrics and ledger: the median
step after the first two, where it went, and what of it was digests and the canary; the most that was taken of the GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import tandem
from tandem.errors import TandemError
from tandem.ops.footprint import DeviceMemory
from tandem.recipes import build_engine
from tandem.recipes.shapes import random_checkpoint
from tandem.spec.load import parse_spec

PROVING = ("hash", "verify", "check", "digest", "prove", "canary")


def spec_of(mode: str, checkpoint: Path, arguments: argparse.Namespace) -> Any:
    compiled = {"attention": "packed", "compile": True} if arguments.compile else {}
    model: dict[str, Any] = {"path": str(checkpoint), "activations": arguments.activations, **compiled}
    if mode.startswith("adapter"):
        model["lora"] = {"rank": 16}
    engine: dict[str, Any] = {
        "kind": "vllm", "python": arguments.python, "max_context": 1024, "memory_share": arguments.memory_share,
        "replicas": arguments.replicas,
    }  # fmt: skip
    if arguments.gpus:
        engine["gpus"] = arguments.gpus
    return parse_spec(
        {
            "recipe": "rl", "name": "steps", "device": "cuda", "deterministic": False, "model": model,
            "precision": {"weights": "bfloat16"}, "environment": {"name": str(Path(__file__).with_name("vowels.py"))},
            "engine": engine, "sync": {"bridge": mode, "deadline_s": 120.0},
            "train": {
                "steps": arguments.steps, "lr": arguments.lr, "groups_per_step": arguments.groups, "group_size": 8,
                "max_tokens": 512, "max_lag": arguments.lag, "replace_equal_groups": 0, "max_logprob_gap": 0.3,
                "micro_tokens": arguments.micro_tokens, "optimizer": {"kind": arguments.optimizer},
            },
            "eval": {"tasks": 8},
        }
    )  # fmt: skip


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(mode: str, checkpoint: Path, arguments: argparse.Namespace, home: Path) -> dict[str, Any]:
    with DeviceMemory() as memory:
        result = tandem.run(spec_of(mode, checkpoint, arguments), run_dir=home)
    trained = [row for row in rows(home / "metrics.jsonl") if "time/step_s" in row][2:]
    proofs = rows(home / "sync.jsonl")[3:]
    middle = {name: statistics.median(row.get(name, 0.0) for row in trained) for name in trained[0]}
    phases = {
        name: statistics.median(proof["seconds"].get(name, 0.0) for proof in proofs) for name in proofs[-1]["seconds"]
    }
    return {
        "mode": mode, "lag": arguments.lag, "steps": len(trained), "step_s": middle["time/step_s"],
        "share": sum(phases.get(name, 0.0) for name in PROVING) / middle["time/step_s"],
        "sync_ms": {name: round(seconds * 1e3, 2) for name, seconds in phases.items() if seconds},
        "generate_s": middle["time/generate_s"], "train_s": middle["time/train_s"], "sync_s": middle["time/sync_s"],
        "sampled": middle.get("tokens/sampled", 0.0), "computed": middle.get("tokens/computed", 0.0),
        "gap": middle.get("sync/logprob_gap", 0.0), "peak_gib": memory.extra_bytes / 2**30,
        "all": [row["time/step_s"] for row in trained], "rewards": [row.get("reward/mean", 0.0) for row in trained],
        "memory": {name: value for name, value in middle.items() if name.startswith("memory/")},
        "verified": sorted({proof["verified"] for proof in proofs}), "result": str(result)[:200],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("modes", nargs="+")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--gpus", type=int, nargs="*", default=[])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--memory-share", type=float, default=0.3)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--activations", default="keep")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--python", default=build_engine.default_python())
    arguments = parser.parse_args()
    checkpoint = Path("/tmp") / arguments.shape
    if not checkpoint.exists():
        random_checkpoint(arguments.shape, checkpoint, device="cuda")
    found: list[dict[str, Any]] = []
    for mode in arguments.modes:
        home = Path("/tmp/steps") / f"{arguments.shape}-{mode}-{arguments.lag}"
        shutil.rmtree(home, ignore_errors=True)
        try:
            row = measure(mode, checkpoint, arguments, home)
            print(
                f"{arguments.shape} {mode} lag {arguments.lag}: step {row['step_s']:.2f} s (rollouts "
                f"{row['generate_s']:.2f}, training {row['train_s']:.2f}, sync {row['sync_s']:.3f}), "
                f"{row['sampled']:.0f} sampled, {row['computed']:.0f} computed, gap {row['gap']:.4f}, "
                f"peak {row['peak_gib']:.1f} GiB; "
                f"verification {row['share']:.2%}: {row['sync_ms']}",
                flush=True,
            )
        except (TandemError, AssertionError) as error:
            row = {"mode": mode, "error": f"{type(error).__name__}: {error}"}
            print(f"{arguments.shape} {mode:18} FAILED {row['error'][:1500]}", flush=True)
            for log in sorted(home.rglob("*.log")):
                text = "\n".join(log.read_text(errors="replace").splitlines()[-200:])
                Path(os.environ.get("OUT", "."), f"{mode}-{log.name}.txt").write_text(text)
        found.append(row)
    name = f"steps-{arguments.shape}-{'-'.join(arguments.modes)}-{arguments.lag}-{arguments.replicas}.json"
    Path(os.environ.get("OUT", "."), name).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
