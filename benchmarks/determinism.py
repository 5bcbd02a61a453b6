"""Two runs of one spec: the same bytes in metrics (time and memory apart) and weights?

python benchmarks/determinism.py
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import note, table
from tandem.types import MEASURED

SPEC = Path(__file__).parent.parent / "examples" / "quickstart.toml"
CASES = {
    "on-policy, full": [],
    "on-policy, LoRA": ["model.lora.rank=8"],
    "max_lag = 1, full": ["train.max_lag=1"],
    "on-policy, bf16 and split": ["precision.weights=bfloat16"],
}


def digests(overrides: list[str], directory: Path) -> tuple[str, str]:
    command = [sys.executable, "-m", "tandem", "train", str(SPEC), "--run-dir", str(directory)]
    for override in ["environment.params.letters=3", "warmup.steps=120", "train.steps=10", "eval.tasks=64", *overrides]:
        command += ["--set", override]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    kept = [{key: value for key, value in row.items() if not key.startswith(MEASURED)} for row in rows]
    metrics = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
    return metrics[:16], hashlib.sha256((directory / "export" / "model.safetensors").read_bytes()).hexdigest()[:16]


def main() -> None:
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as root:
        for number, (name, overrides) in enumerate(CASES.items()):
            first, second = (digests(overrides, Path(root) / f"{number}-{turn}") for turn in range(2))
            rows.append([name, *first, "yes" if first == second else "NO"])
    table(["run", "metrics", "weights", "twice the same"], rows)
    note("must be: yes in every row")


if __name__ == "__main__":
    main()
