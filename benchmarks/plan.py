"""Planned against measured peak memory and seconds on this CPU: `python benchmarks/plan.py [--only medium]`.

Each case is a process of its own: its peak resident memory, less what it had after the imports and a first tiny step;
and the median seconds of the later steps, of processor time, since other work on the machine is no part of a plan. Exit
code 1: a peak is more than 10 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import note, table

CASES = [
    {
        "preset": preset,
        "lora": lora,
        "recipe": recipe,
        "sequences": sequences,
        "length": length,
        "activations": kept,
        "saves": saves,
    }
    for preset, sequences, length in (("tiny", 16, 256), ("medium", 4, 256))
    for recipe in ("sft", "rl")
    for lora in (False, True)
    for kept in (("keep", "recompute") if (recipe, lora) == ("sft", False) else ("keep",))
    for saves in ((False, True) if (preset, recipe, kept) == ("medium", "sft", "keep") else (False,))
]
PROMPT, GROUP = 64, 4


def spec_of(case: dict[str, Any]) -> Any:
    from tandem.spec.load import parse_spec

    model: dict[str, Any] = {"preset": case["preset"], "activations": case["activations"]}
    if case["lora"]:
        model["lora"] = {"rank": 16}
    train = {"steps": 3, "lr": 1e-5, "micro_tokens": case["sequences"] * case["length"]}
    if case["recipe"] == "sft":
        data = {"kind": "file", "path": "none.jsonl"}
        whole = {"recipe": "sft", "data": data, "train": {**train, "batch_size": case["sequences"]}}
    else:
        groups = {"groups_per_step": case["sequences"] // GROUP, "group_size": GROUP}
        train |= {**groups, "max_tokens": case["length"] - PROMPT, "max_logprob_gap": 100.0}
        whole = {"recipe": "rl", "environment": {"name": "sort"}, "train": train, "eval": {"tasks": 2}}
    whole["checkpoint"] = {"every": 1 if case["saves"] else 0}
    return parse_spec({**whole, "device": "cpu", "model": model})


def planned(case: dict[str, Any]) -> tuple[float, float]:
    """MiB without the process itself, and seconds of training."""
    from tandem.runs.calibration import machine
    from tandem.runs.plan import plan_run

    fixed = {"row_tokens": case["length"]}
    if case["recipe"] == "rl":
        fixed = {"prompt_tokens": PROMPT, "answer_tokens": case["length"] - PROMPT}
    plan = plan_run(spec_of(case), gpu="cpu", **fixed)
    return (plan.peak_gib - machine("cpu").context_gib) * 1024, plan.times.train_s


def measured(case: dict[str, Any]) -> tuple[float, float]:
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    mib, seconds = json.loads(done.stdout.splitlines()[-1])
    return mib, seconds


def in_this_process(case: dict[str, Any]) -> tuple[float, float]:
    import asyncio

    import torch

    from tandem.recipes import build
    from tandem.spec.model import PresetModel

    device = torch.device("cpu")
    spec = spec_of(case)
    small = build.model(PresetModel(preset="tiny", lora=spec.model.lora), spec.precision, 0, device)
    asyncio.run(steps(spec, small, 1, 64, 1))
    del small
    base = resident("VmRSS")
    model = build.model(spec.model, spec.precision, 0, device)
    took = asyncio.run(steps(spec, model, case["sequences"], case["length"], 4))
    return resident("VmHWM") - base, statistics.median(took[1:])


async def steps(spec: Any, model: Any, sequences: int, length: int, count: int) -> list[float]:
    from tandem.recipes import build, build_alone
    from tandem.spec.engine import HfEngineSpec
    from tandem.types import Sampling

    rl = spec.recipe == "rl"
    algorithm = build.algorithm(spec.algorithm, spec.train.max_tokens) if rl else build.sft_algorithm()
    trainer = build.trainer(spec.train, model, algorithm, 0, 0)
    rng = random.Random(0)
    engine = build_alone.embedded(HfEngineSpec(), model, inline=True) if rl else None
    took: list[float] = []
    for version in range(count):
        size = GROUP if rl else 1
        rows = [each for _ in range(max(1, sequences // size)) for each in siblings(rng, size, length)]
        if engine is not None:  # fills the cache as a rollout would; what it says is not what is trained on
            sampling = Sampling(max_tokens=max(1, length - PROMPT), temperature=0.0)  # it repeats itself to the end
            await sample(engine, rows, sampling)
            await engine.sleep()
        groups = [played(rows[n : n + size], version) for n in range(0, len(rows), size)]
        started = time.process_time()
        trainer.step(build.batches(spec.train, model, algorithm)(groups, version))
        took.append(time.process_time() - started)
        if spec.checkpoint.every:
            trainer.snapshot()
        if engine is not None:
            await engine.wake()
    if engine is not None:
        await engine.close()
    return took


def siblings(rng: random.Random, size: int, length: int) -> list[list[int]]:
    """Random tokens; those of a group share the prompt."""
    prompt = [rng.randrange(256) for _ in range(PROMPT if size > 1 and length > PROMPT else 1)]
    return [[*prompt, *(rng.randrange(256) for _ in range(length - len(prompt)))] for _ in range(size)]


def played(rows: list[list[int]], version: int) -> list[Any]:
    from tandem.types import Trajectory

    first = PROMPT if len(rows) > 1 and len(rows[0]) > PROMPT else 1
    trained = [n >= first for n in range(len(rows[0]))]
    versions = [version if each else -1 for each in trained]
    logprobs = [-5.5 if each else 0.0 for each in trained]
    return [Trajectory(ids, trained, logprobs, versions, reward=float(n % 2)) for n, ids in enumerate(rows)]


async def sample(engine: Any, rows: list[list[int]], sampling: Any) -> None:
    import asyncio

    await asyncio.gather(*(engine.generate(ids[:PROMPT] if len(ids) > PROMPT else ids[:32], sampling) for ids in rows))


def resident(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="words of a case's name, with commas")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(in_this_process(json.loads(arguments.case))))
        return
    note("one thread; MiB above the imports, processor seconds of a step's training")
    rows, worst = [], 0.0
    for case in CASES:
        how = f"{'LoRA' if case['lora'] else 'full'}, {case['activations']}{', saved' * case['saves']}"
        name = f"{case['preset']} {case['recipe']} {how}"
        if not all(word in name for word in arguments.only.split(",")):
            continue
        (mib, seconds), (mib_m, seconds_m) = planned(case), measured(case)
        worst = max(worst, abs(mib / mib_m - 1))
        found = (f"{mib:.0f}", f"{mib_m:.0f}", f"{mib / mib_m - 1:+.1%}")
        found += (f"{seconds:.2f}", f"{seconds_m:.2f}", f"{seconds / seconds_m - 1:+.0%}")
        rows.append((name, f"{case['sequences'] * case['length']:,}", *found))
        print(*rows[-1], sep=" | ", flush=True)
    table(("case", "tokens", "MiB planned", "measured", "off by", "s planned", "measured", "off by"), rows)
    if worst > 0.1:
        sys.exit(1)


if __name__ == "__main__":
    main()
