"""GRPO with several ranks and engines, as a user starts it: `python benchmarks/gpu/grpo_ranks.py --shape qwen3-8b`.

`tandem train` on a random checkpoint of the shape: `--ranks` GPUs train, the next `--replicas` x `--tensor-parallel`
serve through vLLM, and `broadcast` carries every version from all ranks to all engines. With `--bridge shared` the
ranks train in the memory of as many tensor-parallel workers, on the same GPUs; with `--bridge disk` engines may be
anywhere, also on the ranks' GPUs (`--gpus`). Each `--lag` is a run of its own. Of the run's own metrics and ledger,
medians after WARM steps: the step and its parts, how long requests waited for a version and how long it took in all,
without the canary. Details go to $OUT.

`--task chain_sum` (or another of real_tasks.py) with `--checkpoint` of a pretrained model: the reward of each step then
says whether it learns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from ranks import Started
from real_tasks import KINDS
from standing import ask_for_checkpoint, checkpoint_of

from tandem.build import standalone_engines

OUT = Path(os.environ.get("OUT", "."))
WARM = 3


def spec_of(asked: argparse.Namespace, checkpoint: Path, lag: int) -> dict[str, Any]:
    engines, here = asked.replicas * asked.tensor_parallel, Path(__file__)
    environment: dict[str, Any] = {"name": str(here.with_name("vowels.py"))}
    if asked.task:
        environment = {"name": f"{here.with_name('real_tasks.py')}:RealTask", "params": {"kind": asked.task}}
    optimizer: dict[str, Any] = {"kind": asked.optimizer}
    if ":" in asked.optimizer:
        optimizer = {"kind": "own", "name": str(here.with_name(asked.optimizer)), "state_bytes": 0.0}
    first = 0 if asked.bridge == "shared" else asked.ranks
    return {
        "recipe": "rl", "name": "grpo", "deterministic": False,
        "model": {
            "path": str(checkpoint), "attention": "packed", "compile": asked.compile, "activations": asked.activations,
        },
        "precision": {"weights": "bfloat16", "master": asked.master},
        "parallel": {"ranks": asked.ranks, "deadline_s": 240.0}, "environment": environment,
        "engine": {
            "kind": "vllm", "python": asked.python, "gpus": asked.gpus or list(range(first, first + engines)),
            "replicas": asked.replicas, "tensor_parallel": asked.tensor_parallel, "eager": asked.eager,
            "memory_share": asked.memory_share, "max_context": asked.tokens + 512,
            "max_running": asked.group_size * asked.groups,
        },
        "sync": {"bridge": asked.bridge, "deadline_s": 240.0},
        "train": {
            "steps": asked.steps, "lr": asked.lr, "groups_per_step": asked.groups, "group_size": asked.group_size,
            "max_tokens": asked.tokens, "max_lag": lag, "replace_equal_groups": 0, "max_logprob_gap": 0.3,
            "micro_tokens": asked.micro_tokens, "optimizer": optimizer,
        },
        "eval": {"tasks": 8}, "checkpoint": {"every": 0},
    }  # fmt: skip


def proofs_of(directory: Path) -> list[dict[str, Any]]:
    path = directory / "sync.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(run: Started, lag: int) -> dict[str, Any]:
    rows, proofs = run.rows()[WARM:], proofs_of(run.directory)[1 + WARM :]

    def middle(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in rows)

    def of_proofs(name: str) -> list[float]:
        return sorted(proof["seconds"].get(name, 0.0) * 1e3 for proof in proofs)

    whole = [(proof["seconds"]["total"] - proof["seconds"].get("canary", 0.0)) * 1e3 for proof in proofs]
    return {
        "lag": lag, "steps": len(rows), "step_s": middle("time/step_s"), "generate_s": middle("time/generate_s"),
        "train_s": middle("time/train_s"), "sync_s": middle("time/sync_s"), "sampled": middle("tokens/sampled"),
        "imbalance": middle("parallel/imbalance"), "gap": middle("sync/logprob_gap"), "peak_gib": middle("memory/peak"),
        "paused_ms": of_proofs("paused"), "sync_ms": sorted(whole), "proofs": len(proofs),
        "verified": sorted({proof["verified"] for proof in proofs}),
        "bytes": max((proof["bytes_moved"] for proof in proofs), default=0),
        "phases_ms": {name: statistics.median(of_proofs(name)) for name in (proofs[-1]["seconds"] if proofs else {})},
        "all": [row["time/step_s"] for row in run.rows()],
        "rewards": [row["reward/mean"] for row in run.rows() if "reward/mean" in row],
    }  # fmt: skip


def told(asked: argparse.Namespace, row: dict[str, Any]) -> str:
    paused, sync = row["paused_ms"], row["sync_ms"]
    return (
        f"{asked.shape}, {asked.ranks} + {asked.replicas} x TP {asked.tensor_parallel}, lag {row['lag']}: step "
        f"{row['step_s']:.2f} s (rollouts {row['generate_s']:.2f}, training {row['train_s']:.2f}, sync "
        f"{row['sync_s']:.3f}) of {[round(each, 2) for each in row['all']]}; {row['sampled']:.0f} sampled, "
        f"{row['sampled'] / row['step_s']:.0f}/s; peak {row['peak_gib']:.1f} GiB of rank 0, imbalance "
        f"{row['imbalance']:.3f}\n  {row['proofs']} versions {row['verified']}, {row['bytes'] / 1e9:.1f} GB: paused "
        f"{statistics.median(paused):.1f} ms ({paused[0]:.1f}-{paused[-1]:.1f}), in all {statistics.median(sync):.1f} "
        f"ms ({sync[0]:.1f}-{sync[-1]:.1f}); gap {row['gap']:.4f}\n"
        f"  rewards {[round(each, 3) for each in row['rewards']]}\n"
        f"  { ({name: round(ms, 1) for name, ms in row['phases_ms'].items()}) }"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask_for_checkpoint(parser, "qwen3-8b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--lag", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--bridge", default="broadcast", choices=["broadcast", "shared", "disk"])
    parser.add_argument("--gpus", type=int, nargs="+", help="of the engines, one after the other")
    parser.add_argument("--task", default="", choices=["", *KINDS])
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--optimizer", default="adamw_8bit", help="or sign_sgd.py:SignSgd, which keeps no state")
    parser.add_argument("--master", default="split")
    parser.add_argument("--activations", default="selective")
    parser.add_argument("--micro-tokens", type=int, default=12288)
    parser.add_argument("--memory-share", type=float, default=0.8)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: vLLM starts sooner, and decodes slower")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limit-s", type=float, default=400.0, help="of one run")
    parser.add_argument("--python", default=standalone_engines.default_python())
    asked = parser.parse_args()
    checkpoint = checkpoint_of(asked)
    torch.cuda.empty_cache()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        for lag in asked.lag:
            directory = Path(place) / f"grpo-{asked.shape}-{lag}"
            run = Started(spec_of(asked, checkpoint, lag), directory)
            if run.measured(asked.steps, asked.limit_s) or len(run.rows()) <= WARM:
                found.append({"lag": lag, "failed": run.what_it_said()})
                print(f"{asked.shape} lag {lag} FAILED: {found[-1]['failed']}", flush=True)
            else:
                found.append(summary(run, lag))
                print(told(asked, found[-1]), flush=True)
            for log in directory.rglob("vllm*.log"):
                text = "\n".join(log.read_text(errors="replace").splitlines()[-300:])
                (OUT / f"{directory.name}-{log.parent.name}-{log.name}").write_text(text)
            shutil.rmtree(directory, ignore_errors=True)
    (OUT / f"grpo-{asked.shape}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
