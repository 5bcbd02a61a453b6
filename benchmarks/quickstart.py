"""The quickstart as a newcomer runs it, on several seeds: seconds in all, and held-out accuracy.

python benchmarks/quickstart.py [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import note, table

SPEC = Path(__file__).parent.parent / "examples" / "quickstart.toml"


def run(seed: int, directory: Path) -> list[str]:
    command = [sys.executable, "-m", "tandem", "train", str(SPEC), "--run-dir", str(directory), "--set", f"seed={seed}"]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    taken = time.perf_counter() - started
    status = json.loads((directory / "status.json").read_text())
    found = status["eval"]
    low, high = found["interval"]
    return [
        str(seed),
        f"{found['before']:.3f}",
        f"{found['before_rl']:.3f}",
        f"{found['after']:.3f}",
        f"{found['after_minus_before_rl']:+.3f} [{low:+.3f}, {high:+.3f}]",
        status["verdict"],
        f"{taken:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as root:
        rows = [run(seed, Path(root) / str(seed)) for seed in seeds]
    table(["seed", "before", "before RL", "after", "after - before RL (95 %)", "verdict", "seconds"], rows)
    note("must be: before RL <= 0.45, after >= 0.95, seconds <= 120 on 2 idle cores")


if __name__ == "__main__":
    main()
