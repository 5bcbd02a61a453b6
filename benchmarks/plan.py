"""Planned against measured peak memory on this CPU: `python benchmarks/plan.py`. Exit code 1: one is over 10 % off.

Each case is a process of its own: its peak resident memory, less what it had after the imports and a first tiny step.
glibc keeps what was freed for later, up to as much again as the activations; MALLOC_MMAP_THRESHOLD_ makes it give that
back at once, which is how the peak is measured. The column "as it comes" is without.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import note, table

CASES = [
    {"preset": preset, "lora": lora, "recipe": recipe, "sequences": sequences, "length": length, "activations": kept}
    for preset, sequences, length in (("tiny", 16, 256), ("medium", 4, 256))
    for recipe in ("sft", "rl")
    for lora in (False, True)
    for kept in (("keep", "recompute") if (recipe, lora) == ("sft", False) else ("keep",))
]
MIB = 2**20


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
        train |= {"groups_per_step": case["sequences"] // 4, "group_size": 4, "max_tokens": case["length"] - 64}
        whole = {"recipe": "rl", "environment": {"name": "sort"}, "train": train, "eval": {"tasks": 2}}
    return parse_spec({**whole, "device": "cpu", "model": model})


def planned_mib(case: dict[str, Any]) -> float:
    """Without the process itself."""
    from tandem.runs.calibration import machine
    from tandem.runs.plan import plan_run

    fixed = {"row_tokens": case["length"]} if case["recipe"] == "sft" else {"prompt_tokens": 64}
    return (plan_run(spec_of(case), gpu="cpu", **fixed).peak_gib - machine("cpu").context_gib) * 1024


def measured_mib(case: dict[str, Any], *, give_back: bool = True) -> float:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if give_back:
        environment["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def in_this_process(case: dict[str, Any]) -> float:
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
    asyncio.run(steps(spec, model, case["sequences"], case["length"], 3))
    return resident("VmHWM") - base


async def steps(spec: Any, model: Any, sequences: int, length: int, count: int) -> None:
    from tandem.recipes import build, build_engine
    from tandem.spec.engine import HfEngineSpec
    from tandem.types import Sampling, Trajectory

    algorithm = build.sft_algorithm()
    trainer = build.trainer(spec.train, model, algorithm, 0, 0)
    rng = random.Random(0)
    engine = build_engine.embedded(HfEngineSpec(), model, inline=True) if spec.recipe == "rl" else None
    for version in range(count):
        rows = [[rng.randrange(256) for _ in range(length)] for _ in range(sequences)]
        if engine is not None:  # fills the cache as a rollout would; what it says is not what is trained on
            sampling = Sampling(max_tokens=length - 64) if length > 64 else Sampling(max_tokens=1)
            await sample(engine, rows, sampling)
            await engine.sleep()
        groups = [[Trajectory(ids, [False] + [True] * (length - 1), [0.0] * length, [-1] * length)] for ids in rows]
        trainer.step(build.batches(spec.train, model, algorithm)(groups, version))
        if engine is not None:
            await engine.wake()
    if engine is not None:
        await engine.close()


async def sample(engine: Any, rows: list[list[int]], sampling: Any) -> None:
    import asyncio

    await asyncio.gather(*(engine.generate(ids[:64] if len(ids) > 64 else ids[:32], sampling) for ids in rows))


def resident(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case")
    arguments = parser.parse_args()
    if arguments.case:
        print(in_this_process(json.loads(arguments.case)))
        return
    note("one thread; MiB above the imports")
    rows, worst = [], 0.0
    for case in CASES:
        planned, measured = planned_mib(case), measured_mib(case)
        comes = measured_mib(case, give_back=False)
        worst = max(worst, abs(planned / measured - 1))
        name = f"{case['preset']} {case['recipe']} {'LoRA' if case['lora'] else 'full'}, {case['activations']}"
        tokens = f"{case['sequences'] * case['length']:,}"
        rows.append(
            (name, tokens, f"{planned:.0f}", f"{measured:.0f}", f"{planned / measured - 1:+.1%}", f"{comes:.0f}")
        )
    table(("case", "tokens a step", "planned", "measured", "off by", "as it comes"), rows)
    if worst > 0.1:
        sys.exit(1)


if __name__ == "__main__":
    main()
