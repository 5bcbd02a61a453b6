"""Steps of GRPO as a user would run them: `python benchmarks/gpu/steps.py shared --shape qwen3-1.7b`.

Random weights of the shape, with a vocabulary of Qwen's size; 32 groups of 8 answers of up to 512 tokens a step. Each
CASE is a bridge and, behind a colon, a lag (broadcast:1): a run of its own, all of them beside one vLLM behind `tandem
engine serve`, on the same GPU or on another one (`--gpu 1`). Of a run's own metrics and ledger: the median step after
the first two, where it went, and what of it was digests and the canary; the most that was taken of the GPUs, vLLM's
share with it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from standing import ask_for_checkpoint, checkpoint_of, standing, taken

import tandem
from tandem.build import standalone_engines
from tandem.errors import TandemError
from tandem.spec.load import parse_spec

PROVING = ("hash", "verify", "check", "digest", "prove", "canary")
WARM = 2


def spec_of(case: str, checkpoint: Path, engine: dict[str, Any], arguments: argparse.Namespace) -> Any:
    mode, _, lag = case.partition(":")
    compiled = {"attention": "packed", "compile": True} if arguments.compile else {}
    model: dict[str, Any] = {"path": str(checkpoint), "activations": arguments.activations, **compiled}
    if mode.startswith("adapter"):
        model["lora"] = {"rank": 16}
    return parse_spec(
        {
            "recipe": "rl", "name": "steps", "device": arguments.device, "deterministic": False, "model": model,
            "precision": {"weights": "bfloat16"}, "environment": {"name": str(Path(__file__).with_name("vowels.py"))},
            "engine": engine, "sync": {"bridge": mode, "deadline_s": 120.0},
            "train": {
                "steps": arguments.steps, "lr": arguments.lr, "groups_per_step": arguments.groups, "group_size": 8,
                "max_tokens": arguments.tokens, "max_lag": int(lag or 0), "replace_equal_groups": 0,
                "max_logprob_gap": 0.3, "micro_tokens": arguments.micro_tokens,
                "optimizer": {"kind": arguments.optimizer},
            },
            "eval": {"tasks": 8}, "checkpoint": {"every": 0},  # of 8B they fill a disk
        }
    )  # fmt: skip


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(case: str, spec: Any, home: Path) -> dict[str, Any]:
    started = time.perf_counter()
    with taken() as memory:
        result = tandem.run(spec, run_dir=home)
    trained = [row for row in rows(home / "metrics.jsonl") if "time/step_s" in row]
    after = trained[WARM:]
    proofs = rows(home / "sync.jsonl")[1 + WARM :]
    numbers = {name: [row[name] for row in after if isinstance(row.get(name), int | float)] for name in after[0]}
    middle = {name: statistics.median(found) for name, found in numbers.items() if found}
    phases = {
        name: statistics.median(proof["seconds"].get(name, 0.0) for proof in proofs) for name in proofs[-1]["seconds"]
    }
    return {
        "case": case, "steps": len(after), "step_s": middle["time/step_s"],
        "share": sum(phases.get(name, 0.0) for name in PROVING) / middle["time/step_s"],
        "sync_ms": {name: round(seconds * 1e3, 2) for name, seconds in phases.items() if seconds},
        "generate_s": middle["time/generate_s"], "train_s": middle["time/train_s"], "sync_s": middle["time/sync_s"],
        "sampled": middle.get("tokens/sampled", 0.0), "computed": middle.get("tokens/computed", 0.0),
        "gap": middle.get("sync/logprob_gap", 0.0),
        "peak_gib": memory.peak_gib, "before_gib": memory.before_gib,
        "all": [row["time/step_s"] for row in trained],
        "rewards": [row["reward/mean"] for row in trained if "reward/mean" in row],  # a step's, if any came since
        "memory": {name: value for name, value in middle.items() if name.startswith("memory/")},
        "verified": sorted({proof["verified"] for proof in proofs}), "run_s": time.perf_counter() - started,
        "result": str(result)[:200], "middle": middle,
    }  # fmt: skip


def told(row: dict[str, Any]) -> str:
    return (
        f"step {row['step_s']:.2f} s (rollouts {row['generate_s']:.2f}, training {row['train_s']:.2f}, sync "
        f"{row['sync_s']:.3f}) of {[round(each, 2) for each in row['all']]}, {row['sampled']:.0f} sampled, "
        f"{row['computed']:.0f} computed, {(row['sampled'] / row['step_s']):.0f} sampled/s, gap {row['gap']:.4f}, peak "
        f"{row['peak_gib']:.1f} GiB ({row['before_gib']:.1f} before), {row['verified']}, in all {row['run_s']:.0f} s\n"
        f"  rewards {[round(each, 4) for each in row['rewards']]}\n"
        f"  verification {row['share']:.2%}: {row['sync_ms']}"
    )


def beside_one_engine(cases: list[str], checkpoint: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    home, found = Path("/tmp/steps") / checkpoint.name, list[dict[str, Any]]()
    shutil.rmtree(home, ignore_errors=True)
    asked: dict[str, Any] = {
        "kind": "vllm", "python": arguments.python, "max_context": arguments.tokens + 512,
        "memory_share": arguments.memory_share, "max_running": arguments.max_running or 8 * arguments.groups,
        "on_update": arguments.on_update,
    }  # fmt: skip
    asked |= {"gpus": [arguments.gpu]} if arguments.gpu else {}
    adapters = ["--adapter-slots", "4"] if cases[0].startswith("adapter") else []
    with standing(asked, checkpoint, home / "engine", device=arguments.device, more=adapters) as engine:
        for case in cases:
            run = home / case.replace(":", "-")
            try:
                row = measure(case, spec_of(case, checkpoint, engine, arguments), run)
                print(f"{checkpoint.name} {case}: {told(row)}", flush=True)
            except (TandemError, AssertionError, RuntimeError) as error:
                row = {"case": case, "error": f"{type(error).__name__}: {error}"}
                print(f"{checkpoint.name} {case} FAILED {row['error'][:1500]}", flush=True)
            found.append(row)
            for log in [*run.rglob("*.txt"), *run.rglob("metrics.jsonl"), *home.rglob("vllm.log")]:
                text = "\n".join(log.read_text(errors="replace").splitlines()[-400:])
                out = Path(os.environ.get("OUT", "."), f"{checkpoint.name}-{run.name}-{log.name}")
                out.write_text(text)
            torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+")
    ask_for_checkpoint(parser)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--gpu", type=int, default=0, help="vLLM's")
    parser.add_argument("--max-running", type=int, default=0, help="sequences that vLLM decodes together; 0: a step's")
    parser.add_argument("--on-update", default="auto", help="what becomes of requests under way")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--memory-share", type=float, default=0.3)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--activations", default="keep")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--python", default=standalone_engines.default_python())
    arguments = parser.parse_args()
    checkpoint = checkpoint_of(arguments)
    adapters = [case for case in arguments.cases if case.startswith("adapter")]
    full = [case for case in arguments.cases if case not in adapters]
    found = [row for cases in (full, adapters) if cases for row in beside_one_engine(cases, checkpoint, arguments)]
    name = f"steps-{checkpoint.name}-{'-'.join(arguments.cases).replace(':', '')}.json"
    Path(os.environ.get("OUT", "."), name).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
