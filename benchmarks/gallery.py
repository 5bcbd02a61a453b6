"""Every environment of examples/gallery with the tiny model from scratch: held-out results before RL and after.

python benchmarks/gallery.py [--seed 0] [--only NAME ...] [--keep DIR]

Trains each by its own run.toml: demonstrations first, then GRPO. The interval is that of the paired verdict
(src/tandem/runs/verdict.py). Seconds are of CPU, since the machine may be shared. Exit code 1 if an interval is not
above 0.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import note, table
from tandem.obs.text_charts import sparkline

ROOT = Path(__file__).parent.parent
GALLERY = ROOT / "examples" / "gallery"
NAMES = sorted(spec.parent.name for spec in GALLERY.glob("*/run.toml"))
HEAD = ["environment", "before RL", "after", "after - before RL (95 %)", "tasks", "curve of RL", "CPU s"]


def train(name: str, directory: Path, seed: int) -> float:
    """Train one in a process of its own; return the seconds of CPU."""
    command = [sys.executable, "-m", "tandem", "train", str(GALLERY / name / "run.toml")]
    settings = ["--run-dir", str(directory), "--set", f"seed={seed}", "--set", "device=cpu"]
    started = cpu_seconds()
    subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return cpu_seconds() - started


def row_of(name: str, directory: Path, seconds: float) -> tuple[list[str], bool]:
    """Return the row of a run that has ended, and whether its interval lies above 0."""
    found: dict[str, Any] = json.loads((directory / "status.json").read_text())["eval"]
    low, high = found["interval"]
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward/mean"] for step in steps if step["stage"] == "rl"]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    return [
        name,
        f"{found['before_rl']:.3f}",
        f"{found['after']:.3f}",
        f"{found['after_minus_before_rl']:+.3f} [{low:+.3f}, {high:+.3f}]",
        str(found["tasks"]),
        f"{first:.2f} {sparkline(rewards, 12)} {last:.2f}",
        f"{seconds:.0f}",
    ], low > 0


def cpu_seconds() -> float:
    """Of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the runs' directories stay")
    asked = parser.parse_args()
    rows, flat = list[list[str]](), list[str]()
    with tempfile.TemporaryDirectory() as root:
        for name in asked.only:
            directory = (asked.keep or Path(root)) / name
            row, rises = row_of(name, directory, train(name, directory, asked.seed))
            rows.append(row)
            print(" ".join(row), file=sys.stderr, flush=True)  # the table comes at the end
            if not rises:
                flat.append(name)
    table(HEAD, rows)
    note(f"seed {asked.seed}; the curve is the mean reward of sampled answers; must be: every interval above 0")
    if flat:
        sys.exit(f"not above 0: {', '.join(flat)}")


if __name__ == "__main__":
    main()
