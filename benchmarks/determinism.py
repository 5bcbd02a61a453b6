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
# Adapters on random weights do not learn to sort, and a run that learns nothing ends; here scores differ at once.
ASCII = """
from tandem.types import Outcome, Task


class Ascii:
    def tasks(self, split):
        return [Task(f"{split} {number}", ({"role": "user", "content": f"{split} {number}"},)) for number in range(200)]

    async def run(self, task, chat):
        reply = await chat.reply()
        return Outcome(sum(character.isascii() for character in reply.text) / (len(reply.text) + 1))

    def demonstrate(self, task, rng):
        return [{"role": "assistant", "content": "".join(rng.choices("abcdefgh", k=rng.randint(2, 6)))}]
"""
CASES = {
    "on-policy, full": [],
    "on-policy, LoRA": ["model.lora.rank=8", "environment.name=ascii.py", "environment.params={}"],
    "max_lag = 1, full": ["train.max_lag=1"],
    "on-policy, bf16 and split": ["precision.weights=bfloat16"],
}


def digests(overrides: list[str], directory: Path) -> tuple[str, str]:
    (directory.parent / "ascii.py").write_text(ASCII)
    command = [sys.executable, "-m", "tandem", "train", str(SPEC), "--run-dir", str(directory)]
    for override in ["environment.params.letters=3", "warmup.steps=120", "train.steps=10", "eval.tasks=64", *overrides]:
        command += ["--set", override]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=directory.parent)
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
