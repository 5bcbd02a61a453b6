"""Runs that are killed and resumed until they end: are weights, optimizer and loss log those of a run that was not?

Every attempt is a process of its own, forked from one that has imported what a run needs, and killed with SIGKILL at a
random instant of its life. Exit code 1 if a run does not go on by itself, or ends with other bytes.

python benchmarks/run_kills.py [--kills 50] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import note, table

ENVIRONMENT = """
from tandem.types import Outcome, Task


class Ascii:
    def tasks(self, split):
        return [Task(f"{split} {number}", ({"role": "user", "content": f"{split} {number}"},)) for number in range(40)]

    async def run(self, task, chat):
        reply = await chat.reply()
        return Outcome(sum(character.isascii() for character in reply.text) / (len(reply.text) + 1))

    def demonstrate(self, task, rng):
        return [{"role": "assistant", "content": "".join(rng.choices("abcdefgh", k=rng.randint(2, 6)))}]
"""
EVERY_STEP = {"every": 1}


def cases(home: Path, steps: int = 8) -> dict[str, dict[str, Any]]:
    """By name: the table of a spec."""
    (home / "ascii.py").write_text(ENVIRONMENT)
    rows = (
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} it is"}] for n in range(60)
    )
    (home / "rows.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    sft = {
        "recipe": "sft",
        "model": {"preset": "tiny"},
        "data": {"kind": "file", "path": str(home / "rows.jsonl")},
        "train": {"steps": 2 * steps, "lr": 1e-3, "batch_size": 4},
        "eval": {"every": 3},
        "checkpoint": EVERY_STEP,
    }
    grpo = {
        "recipe": "rl",
        "model": {"preset": "tiny"},
        "environment": {"name": str(home / "ascii.py")},
        "warmup": {"steps": steps // 2, "lr": 1e-3, "batch_size": 4},
        "train": {"steps": steps, "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "max_tokens": 6},
        "algorithm": {"kind": "grpo", "kl_coef": 0.05},
        "eval": {"tasks": 4, "every": 2},
        "checkpoint": EVERY_STEP,
    }
    return {"SFT": sft, "GRPO": grpo, "LoRA": {**grpo, "model": {"preset": "tiny", "lora": {"rank": 4}}}}


@dataclass
class Told:
    kills: int = 0
    runs: int = 0
    before_first: int = 0
    """Kills before there was a checkpoint."""
    problems: list[str] = field(default_factory=list[str])
    lost_steps: list[int] = field(default_factory=list[int])
    """Of each kill: rows that were made again."""


def forked(work: Callable[[], object], log: Path) -> int:
    """Its pid. Nothing of torch has run in this process, so that a fork of it is as good as new."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must not go on as its parent
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def attempt(spec: dict[str, Any], run_dir: Path) -> None:
    from tandem.recipes import resume, run
    from tandem.spec.load import parse_spec

    if run_dir.exists():
        resume(run_dir)
    else:
        run(parse_spec(spec), run_dir)


def steps_of(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def newest(run_dir: Path) -> int:
    return max((int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*")), default=0)


def trial(home: Path, spec: dict[str, Any], *, kills: int, seed: int) -> Told:
    """Kills runs of one spec, `kills` times in all."""
    # Once, and not in every attempt: an attempt is killed while it runs, and not while it imports.
    import matplotlib.figure  # noqa: F401
    import peft  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    import tandem.build.run_engines
    import tandem.build.training
    import tandem.recipes.rl
    import tandem.recipes.supervised
    import tandem.train.trainer  # noqa: F401
    from tandem.runs.run_ending import digest_run

    rng, told = random.Random(seed), Told()
    home.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if os.waitpid(forked(lambda: attempt(spec, home / "whole"), home / "whole.txt"), 0)[1]:
        told.problems.append(f"the run that nobody killed failed: {(home / 'whole.txt').read_text()[-2000:]}")
        return told
    life_s, expected = time.monotonic() - started, digest_run(home / "whole")
    while told.kills < kills and len(told.problems) < 3:
        run_dir, log = home / f"run-{told.runs}", home / f"run-{told.runs}.txt"
        told.runs += 1
        in_this = 0
        while True:
            pid = forked(lambda at=run_dir: attempt(spec, at), log)
            may_kill = told.kills < kills and in_this < 8
            if may_kill and not ended_within(pid, rng.uniform(0.0, life_s)):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                told.kills, in_this = told.kills + 1, in_this + 1
                told.before_first += newest(run_dir) == 0
                told.lost_steps.append(max(0, steps_of(run_dir) - newest(run_dir)))
                continue
            if code := 0 if may_kill else os.waitpid(pid, 0)[1]:
                told.problems.append(f"{run_dir.name}: ended with {code}: {log.read_text()[-2000:]}")
            elif (found := digest_or_error(run_dir)) != expected:
                told.problems.append(f"{run_dir.name}: {found} instead of {expected}: {log.read_text()[-2000:]}")
            break
    return told


def digest_or_error(run_dir: Path) -> object:
    from tandem.errors import TandemError
    from tandem.runs.run_ending import digest_run

    try:
        return digest_run(run_dir)
    except TandemError as error:
        return str(error)


def ended_within(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    return False


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--kills", type=int, default=50)
    asked.add_argument("--seed", type=int, default=0)
    options = asked.parse_args()
    rows: list[list[str]] = []
    failed = False
    with tempfile.TemporaryDirectory() as root:
        for name, spec in cases(Path(root)).items():
            told = trial(Path(root) / name, spec, kills=options.kills, seed=options.seed)
            failed |= bool(told.problems)
            lost = f"{statistics.fmean(told.lost_steps):.2f}, at most {max(told.lost_steps)}" if told.lost_steps else ""
            whole = told.runs - len(told.problems)
            rows.append([name, str(told.kills), str(told.before_first), f"{whole} of {told.runs}", lost])
            for problem in told.problems:
                print(problem, file=sys.stderr)
    table(["run", "kills", "before a checkpoint", "runs that end with the same bytes", "steps made again a kill"], rows)
    note("must be: all runs, resumed by nobody but `tandem resume`; at most 2 steps made again: one was being written")
    sys.exit(failed)


if __name__ == "__main__":
    main()
