"""Planned against measured memory on this CPU: `python benchmarks/plan.py [--only WORDS] [--ranks 0] [--keep DIR]`.

Each case is a run as a user starts one, from its spec and its data alone, in a process of its own. Planned is what the
run itself wrote into plan.json before it loaded anything. Measured is what the kernel says that process held at most,
Python and torch included: up to the last step (`memory/peak`) and up to its end. `fits` is what `tandem plan` says of a
machine that has a tenth more than the run took. Of a trainer of several ranks (`--ranks 1` runs these cases alone,
`--ranks 0` none of them), the process of each rank is measured, to its end. Exit code 1: a peak is more than 15 % off,
or a run that fits is said not to.
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
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import children_of, note, rank_of, table

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
    ranks: int = 1
    sums: str = "auto"

    @property
    def name(self) -> str:
        trained = "LoRA" if self.lora else "all weights"
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        ranks += f", sums {self.sums}" if self.sums != "auto" else ""
        return f"{self.model}, {self.recipe}, {trained}, {self.data}, {self.activations}, {self.micro_tokens:,}{ranks}"


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
    Case("tiny", "sft", False, "mixed", micro_tokens=2048, batch_size=16, ranks=4),
    Case("medium", "sft", False, "mixed", micro_tokens=1024, batch_size=8, ranks=2),
    Case("medium", "sft", False, "mixed", "recompute", micro_tokens=1024, batch_size=16, ranks=4),
    Case("medium", "sft", True, "long", micro_tokens=1024, batch_size=4, ranks=2),
    Case("medium", "preference", False, "mixed", micro_tokens=2048, batch_size=4, ranks=2),
    Case(SMOLLM2, "sft", False, "mixed", micro_tokens=512, batch_size=4, ranks=2),
    Case(SMOLLM2, "sft", False, "short", micro_tokens=64, batch_size=24, ranks=2, sums="round"),
    Case(SMOLLM2, "sft", False, "short", micro_tokens=64, batch_size=24, ranks=2, sums="running"),
]


def spec_of(case: Case, home: Path) -> dict[str, Any]:
    preset = case.model in ("tiny", "medium")
    model: dict[str, Any] = {"preset": case.model} if preset else {"path": str(home.parent / case.model)}
    model["activations"] = case.activations
    if case.lora:
        model["lora"] = {"rank": 16}
    train: dict[str, Any] = {"steps": STEPS, "lr": 1e-5, "micro_tokens": case.micro_tokens}
    whole: dict[str, Any] = {"recipe": case.recipe, "device": "cpu", "model": model}
    if case.ranks > 1:
        whole["parallel"] = {"ranks": case.ranks, "sums": case.sums}
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


class Ranks:
    """The most that the process of each other rank than 0 held, in GiB, as long as this is open."""

    def __init__(self, leader: int) -> None:
        self._leader, self._over = leader, threading.Event()
        self.peak_gib: dict[int, float] = {}
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            for pid in below(self._leader):
                held = held_gib(pid)
                if held and (rank := rank_of(pid)) > 0:
                    self.peak_gib[rank] = max(held, self.peak_gib.get(rank, 0.0))


def below(pid: int) -> Iterator[int]:
    """Yield the processes that this one started, and theirs: a rank is started by a small process that watches it."""
    for child in children_of(pid):
        yield child
        yield from below(child)


def held_gib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM:")), 0.0)


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
        ranks = Ranks(child.pid)
        _, code, usage = os.wait4(child.pid, 0)
        ranks.close()
        child.returncode = os.waitstatus_to_exitcode(code)
    if child.returncode:
        raise RuntimeError(f"{case.name}: the run failed: {(home / 'output.txt').read_text()[-2000:]}")
    rows = [json.loads(line) for line in (home / "run/metrics.jsonl").read_text().splitlines()]
    plan = json.loads((home / "run/plan.json").read_text())
    of_ranks = [usage.ru_maxrss / 2**20, *(ranks.peak_gib[rank] for rank in range(1, case.ranks))]
    whole = sum(of_ranks)
    command = [*tandem, "plan", str(home / "spec.toml"), "--gpu", "cpu", "--memory-gib", f"{1.1 * whole / 0.95:.3f}"]
    fits = subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    return {
        "planned": plan["trainer_gib"], "measured": max(row["memory/peak"] for row in rows),
        "planned_ranks": plan["ranks_gib"], "measured_ranks": of_ranks,
        "planned_whole": plan["peak_gib"], "measured_whole": whole, "fits": fits and plan["fits"],
        "planned_s": plan["times"]["train_s"],
        "measured_s": statistics.median(row["time/train_s"] for row in rows[1:]),
        "accounted": max(row["memory/accounted"] for row in rows),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="words of a case's name, with commas")
    parser.add_argument("--ranks", choices=("0", "1"), help="1: the cases of several ranks alone; 0: the others alone")
    parser.add_argument("--keep", type=Path, help="where the runs stay; must not exist")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:  # in a process of its own: the memory of a child counts from its parent's
        from tandem.recipes.random_checkpoints import random_checkpoint

        random_checkpoint(SMOLLM2, arguments.make)
        return
    wanted = [case for case in CASES if all(word in case.name for word in arguments.only.split(","))]
    if arguments.ranks is not None:
        wanted = [case for case in wanted if (case.ranks > 1) == (arguments.ranks == "1")]
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.keep or Path(temporary)
        if any(case.model == SMOLLM2 for case in wanted) and not (root / SMOLLM2).exists():
            subprocess.run([sys.executable, __file__, "--make", str(root / SMOLLM2)], check=True)
        rows, of_ranks, missed = [], [], False
        for number, case in enumerate(wanted):
            found = measure(case, root / f"{number:02}")
            off = found["planned"] / found["measured"] - 1
            missed |= abs(off) > OFF or not found["fits"]
            if case.ranks > 1:
                both = zip(found["planned_ranks"], found["measured_ranks"], strict=True)
                off_by = [mine / theirs - 1 for mine, theirs in both]
                missed |= max(map(abs, off_by)) > OFF
                gib = [", ".join(f"{each:.2f}" for each in found[f"{side}_ranks"]) for side in ("planned", "measured")]
                of_ranks.append((case.name, *gib, ", ".join(f"{each:+.1%}" for each in off_by)))
                print(*of_ranks[-1], sep=" | ", flush=True)
            row = (case.name, f"{found['planned']:.2f}", f"{found['measured']:.2f}", f"{off:+.1%}")
            row += (f"{found['planned_whole']:.2f}", f"{found['measured_whole']:.2f}", "yes" if found["fits"] else "NO")
            row += (f"{found['accounted']:.3f}", f"{found['planned_s']:.2f}", f"{found['measured_s']:.2f}")
            rows.append(row)
            print(*row, sep=" | ", flush=True)
    note("one thread; GiB of the whole process, Python and torch included")  # now: it imports torch
    head = ("case", "GiB planned", "measured", "off by", "to the end", "measured", "fits")
    table((*head, "accounted", "s planned", "measured"), rows)
    if of_ranks:
        table(("case", "GiB of each rank's process planned", "measured", "off by"), of_ranks)
    sys.exit(missed)


if __name__ == "__main__":
    main()
