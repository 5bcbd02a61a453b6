"""What verification costs of a step: `python benchmarks/gpu/steps.py shared disk ... --shape qwen3-0.6b`.

A run of GRPO as a user would start it: random weights of the shape, vLLM behind `tandem engine serve` on the same GPU,
32 groups of 8 answers of up to 512 tokens a step. Of its metrics and its ledger: the median step after the first, and
what of it was digests and the canary.
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
from tandem.recipes import build_engine
from tandem.recipes.shapes import random_checkpoint
from tandem.spec.load import parse_spec

PROVING = ("hash", "verify", "check", "digest", "prove", "canary")


def spec_of(mode: str, checkpoint: Path, python: str, steps: int) -> Any:
    model: dict[str, Any] = {"path": str(checkpoint)}
    if mode.startswith("adapter"):
        model["lora"] = {"rank": 16}
    return parse_spec(
        {
            "recipe": "rl", "name": "steps", "device": "cuda", "deterministic": False, "model": model,
            "precision": {"weights": "bfloat16"}, "environment": {"name": str(Path(__file__).with_name("vowels.py"))},
            "engine": {"kind": "vllm", "python": python, "max_context": 1024, "memory_share": 0.4},
            "sync": {"bridge": mode, "deadline_s": 120.0},
            "train": {
                "steps": steps, "lr": 1e-6, "groups_per_step": 32, "group_size": 8, "max_tokens": 512, "max_lag": 0,
                "replace_equal_groups": 0,
            },
            "eval": {"tasks": 8},
        }
    )  # fmt: skip


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(mode: str, checkpoint: Path, python: str, steps: int, home: Path) -> dict[str, Any]:
    result = tandem.run(spec_of(mode, checkpoint, python, steps), run_dir=home)
    trained = [row for row in rows(home / "metrics.jsonl") if "time/step_s" in row][1:]
    proofs = rows(home / "sync.jsonl")[2:]
    step_s = statistics.median(row["time/step_s"] for row in trained)
    phases = {name: statistics.median(proof["seconds"].get(name, 0.0) for proof in proofs) for name in PROVING}
    return {
        "mode": mode, "steps": len(trained), "step_s": step_s, "share": sum(phases.values()) / step_s,
        "ms": {name: round(seconds * 1e3, 2) for name, seconds in phases.items() if seconds},
        "generate_s": statistics.median(row["time/generate_s"] for row in trained),
        "train_s": statistics.median(row["time/train_s"] for row in trained),
        "sync_s": statistics.median(row["time/sync_s"] for row in trained),
        "verified": sorted({proof["verified"] for proof in proofs}), "result": str(result)[:200],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("modes", nargs="+")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--python", default=build_engine.default_python())
    arguments = parser.parse_args()
    checkpoint = Path("/tmp") / arguments.shape
    if not checkpoint.exists():
        random_checkpoint(arguments.shape, checkpoint)
    found: list[dict[str, Any]] = []
    for mode in arguments.modes:
        home = Path("/tmp/steps") / f"{arguments.shape}-{mode}"
        shutil.rmtree(home, ignore_errors=True)
        try:
            row = measure(mode, checkpoint, arguments.python, arguments.steps, home)
            print(
                f"{arguments.shape} {mode:18} step {row['step_s']:.2f} s (rollouts {row['generate_s']:.2f}, training "
                f"{row['train_s']:.2f}, sync {row['sync_s']:.3f}); verification {row['share']:.2%}: {row['ms']}",
                flush=True,
            )
        except (TandemError, AssertionError) as error:
            row = {"mode": mode, "error": f"{type(error).__name__}: {error}"}
            print(f"{arguments.shape} {mode:18} FAILED {row['error'][:1500]}", flush=True)
        found.append(row)
    Path(os.environ.get("OUT", "."), f"steps-{arguments.shape}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
