"""Planned against measured memory on this CPU: `python benchmarks/plan.py [--only smollm2,lora] [--keep DIR]`.

Each case is a run as a user starts one, from its spec and its data alone, in a process of its own. Planned is what the
run itself wrote into plan.json before it loaded anything. Measured is what the kernel says that process held at most,
Python and torch included: up to the last step (`memory/peak`) and up to its end. `fits` is what `tandem plan` says of a
machine that has a tenth more than the run took. Exit code 1: a peak is more than 15 % off, or a run that fits is said
not to.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import note, table

VOWELS = Path(__file__).with_name("gpu") / "vowels.py"
LENGTHS = {"short": (8, 40), "mixed": (16, 700), "long": (900, 1000)}
"""Letters of an answer, each of which is a token."""
ROWS, STEPS = 64, 3
OFF = 0.15
SMOLLM2 = "smollm2-135m"


@dataclass(frozen=True)
class Case:
    """`data`: of LENGTHS; of RL, the most tokens of an answer."""

    model: str
    recipe: str
    lora: bool
    data: str
    activations: str = "keep"
    micro_tokens: int = 16384
    batch_size: int = 4

    @property
    def name(self) -> str:
        trained = "LoRA" if self.lora else "all weights"
        return f"{self.model}, {self.recipe}, {trained}, {self.data}, {self.activations}, {self.micro_tokens:,}"


CASES = [
    Case("tiny", "sft", False, "short", batch_size=16),
    Case("tiny", "sft", True, "mixed", micro_tokens=2048, batch_size=16),
    Case("tiny", "preference", False, "long", micro_tokens=2048),
    Case("tiny", "rl", True, "64"),
    Case("medium", "sft", False, "mixed", micro_tokens=1024),
    Case("medium", "sft", True, "long", micro_tokens=1024, batch_size=2),
    Case("medium", "preference", False, "mixed", micro_tokens=2048, batch_size=2),
    Case("medium", "rl", False, "32"),
    Case(SMOLLM2, "sft", True, "short"),
    Case(SMOLLM2, "sft", True, "long", "recompute", batch_size=1),
    Case(SMOLLM2, "sft", False, "mixed", micro_tokens=512, batch_size=2),
    Case(SMOLLM2, "preference", True, "short", batch_size=2),
]


def spec_of(case: Case, home: Path) -> dict[str, Any]:
    preset = case.model in ("tiny", "medium")
    model: dict[str, Any] = {"preset": case.model} if preset else {"path": str(home.parent / case.model)}
    model["activations"] = case.activations
    if case.lora:
        model["lora"] = {"rank": 16}
    train: dict[str, Any] = {"steps": STEPS, "lr": 1e-5, "micro_tokens": case.micro_tokens}
    whole = {"recipe": case.recipe, "device": "cpu", "model": model}
    if case.recipe == "rl":
        train |= {"groups_per_step": 4, "group_size": 8, "max_tokens": int(case.data)}
        return {**whole, "environment": {"name": str(VOWELS)}, "train": train, "eval": {"tasks": 8}}
    data = {"kind": "file", "path": str(home / "rows.jsonl")}
    return {**whole, "data": data, "train": {**train, "batch_size": case.batch_size}}


def write_rows(path: Path, case: Case) -> None:
    rng = random.Random(0)

    def text() -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(*LENGTHS[case.data]))).strip() + "."

    names = ("completion",) if case.recipe == "sft" else ("chosen", "rejected")
    rows = [{"prompt": f"say {number}", **{name: text() for name in names}} for number in range(ROWS)]
    path.write_text("\n".join(json.dumps(row) for row in rows))


def measure(case: Case, home: Path) -> dict[str, Any]:
    """GiB and seconds, planned and measured."""
    from tandem.spec.load import parse_spec, to_toml

    home.mkdir(parents=True)
    if case.recipe != "rl":
        write_rows(home / "rows.jsonl", case)
    spec = parse_spec(spec_of(case, home))
    (home / "spec.toml").write_text(to_toml(spec))
    tandem = [sys.executable, "-m", "tandem"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (home / "output.txt").open("wb") as output:
        command = [*tandem, "train", str(home / "spec.toml"), "--run-dir", str(home / "run")]
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        _, code, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(code)
    if child.returncode:
        raise RuntimeError(f"{case.name}: the run failed: {(home / 'output.txt').read_text()[-2000:]}")
    rows = [json.loads(line) for line in (home / "run/metrics.jsonl").read_text().splitlines()]
    plan = json.loads((home / "run/plan.json").read_text())
    whole = usage.ru_maxrss / 2**20
    command = [*tandem, "plan", str(home / "spec.toml"), "--gpu", "cpu", "--memory-gib", f"{1.1 * whole / 0.95:.3f}"]
    fits = subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    return {
        "planned": plan["trainer_gib"], "measured": max(row["memory/peak"] for row in rows),
        "planned_whole": plan["peak_gib"], "measured_whole": whole, "fits": fits and plan["fits"],
        "planned_s": plan["times"]["train_s"],
        "measured_s": statistics.median(row["time/train_s"] for row in rows[1:]),
        "accounted": max(row["memory/accounted"] for row in rows),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="words of a case's name, with commas")
    parser.add_argument("--keep", type=Path, help="where the runs stay; must not exist")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:  # in a process of its own: the memory of a child counts from its parent's
        from tandem.recipes.random_checkpoints import random_checkpoint

        random_checkpoint(SMOLLM2, arguments.make)
        return
    wanted = [case for case in CASES if all(word in case.name for word in arguments.only.split(","))]
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.keep or Path(temporary)
        if any(case.model == SMOLLM2 for case in wanted) and not (root / SMOLLM2).exists():
            subprocess.run([sys.executable, __file__, "--make", str(root / SMOLLM2)], check=True)
        rows, missed = [], False
        for number, case in enumerate(wanted):
            found = measure(case, root / f"{number:02}")
            off = found["planned"] / found["measured"] - 1
            missed |= abs(off) > OFF or not found["fits"]
            row = (case.name, f"{found['planned']:.2f}", f"{found['measured']:.2f}", f"{off:+.1%}")
            row += (f"{found['planned_whole']:.2f}", f"{found['measured_whole']:.2f}", "yes" if found["fits"] else "NO")
            row += (f"{found['accounted']:.3f}", f"{found['planned_s']:.2f}", f"{found['measured_s']:.2f}")
            rows.append(row)
            print(*row, sep=" | ", flush=True)
    note("one thread; GiB of the whole process, Python and torch included")  # now: it imports torch
    head = ("case", "GiB planned", "measured", "off by", "to the end", "measured", "fits")
    table((*head, "accounted", "s planned", "measured"), rows)
    sys.exit(missed)


if __name__ == "__main__":
    main()
