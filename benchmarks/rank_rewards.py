"""Does a trainer of several ranks learn as one rank does, and is every version proven?

Runs examples/rl_async.toml (an engine in its own process) for each seed, `max_lag` and number of ranks,
and prints the mean reward of the first and the last steps, the largest
logprob gaps (of trained tokens, and of canaries) and the verdict of `sync audit`.
One to two minutes a run on two cores.

    python benchmarks/rank_rewards.py                              # 3 seeds, max_lag 0 and 1, ranks 1 and 2
    python benchmarks/rank_rewards.py --seeds 0 --lags 1 --ranks 2 --steps 15
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LARGEST_GAP = 1e-6  # in nats, between trainer and engine about the tokens of a step, in float32
_ENDS = 5
"""Steps at each end whose rewards are averaged."""


def one_run(
    seed: int, max_lag: int, ranks: int, steps: int, warmup: int, directory: Path, bridge: str = "broadcast"
) -> dict[str, Any]:
    settings = {
        "sync.bridge": bridge,
        "seed": seed, "train.max_lag": max_lag, "parallel.ranks": ranks, "parallel.shares": 2, "train.steps": steps,
        "warmup.steps": warmup, "eval.tasks": 16,
    }  # fmt: skip
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    tandem = [sys.executable, "-m", "tandem"]
    began = time.monotonic()
    command = [*tandem, "train", str(ROOT / "examples/rl_async.toml"), "--run-dir", str(directory), *changes]
    ended = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    audit = subprocess.run([*tandem, "sync", "audit", str(directory)], capture_output=True, text=True)
    rows = [json.loads(line) for line in (directory / "sync.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in metrics if "reward/mean" in row and row.get("stage") == "rl"]
    first, last = statistics.fmean(rewards[:_ENDS]), statistics.fmean(rewards[-_ENDS:])
    return {
        "seed": seed,
        "max_lag": max_lag,
        "ranks": ranks,
        "versions": len(rows),
        "all_proven": audit.returncode == 0 and all(row["verified"] == "digest" for row in rows),
        "senders": sorted({row["transport"].get("ranks", "1") for row in rows}),
        "largest_gap": max(row["sync/logprob_gap"] for row in metrics if "sync/logprob_gap" in row),
        "largest_canary": max(row["logprob_gap"] for row in rows),
        "first": first,
        "last": last,
        "rises": last > first,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bridge", default="broadcast", choices=["broadcast", "disk", "restart"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=400)
    asked = parser.parse_args()
    print("lag seed ranks versions proven      gap   canary  first   last     s")
    wrong = 0
    with tempfile.TemporaryDirectory() as home:
        for number, (lag, seed, ranks) in enumerate(
            (lag, seed, ranks) for lag in asked.lags for seed in asked.seeds for ranks in asked.ranks
        ):
            row = one_run(seed, lag, ranks, asked.steps, asked.warmup, Path(home) / str(number), asked.bridge)
            good = row["all_proven"] and row["rises"] and row["largest_gap"] <= LARGEST_GAP
            wrong += not good
            print(
                f"{lag:3} {seed:4} {ranks:5} {row['versions']:8} {'all' if row['all_proven'] else 'NOT':>6} "
                f"{row['largest_gap']:8.1e} {row['largest_canary']:8.1e} {row['first']:6.3f} {row['last']:6.3f} "
                f"{row['seconds']:5.0f}"
                f"{'' if good else '  <- not as asked'}",
                flush=True,
            )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
