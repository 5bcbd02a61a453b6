"""`--rehearse`: try the largest micro-batches, an update and a sync in a child process, and compare with the plan.

The run itself then starts unaffected, with its own seed and on an empty GPU. The results are in rehearsal.json.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from tandem.build import built_model, run_engines, training
from tandem.build.reference import set_reference
from tandem.errors import SpecError
from tandem.io import atomic_write
from tandem.runs.planner.lengths import Micro
from tandem.runs.planner.memory import saves_between_steps
from tandem.runs.planner.plan import Plan
from tandem.runs.planner.workload import Work
from tandem.runs.run import Run
from tandem.runs.run_ending import spec_of
from tandem.spec.algorithm import DistillSpec
from tandem.spec.engine import HfEngineSpec, RemoteEngineSpec
from tandem.spec.run import PreferenceSpec, RlSpec, RunSpec
from tandem.types import NO_VERSION, Group, Proof, Trajectory

_FILE = "rehearsal.json"
_NOTABLE = 0.1


def rehearse(run: Run, spec: RunSpec, plan: Plan) -> None:
    """Run the rehearsal and print how it differs from the plan. SpecError if it fails, as the run would fail too."""
    run.event("rehearse")
    run.view.say("   rehearsal: micro-batches of the largest size, an update, a sync")
    log = run.directory / "rehearsal.txt"
    started = time.monotonic()
    with log.open("wb") as output:
        command = [sys.executable, "-m", __name__, str(run.directory)]
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        last = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-1:]
        way_out = f"; try {'; '.join(plan.changes[-2:])}" if plan.changes else ""
        raise SpecError(f"--rehearse: the rehearsal failed: {' '.join(last)} (full log: {log}){way_out}")
    found = json.loads((run.directory / _FILE).read_text(encoding="utf-8"))
    run.event("rehearsed", seconds=time.monotonic() - started, planned_gib=plan.trainer_gib, **found)
    for line in differences(plan, found):
        run.view.say(f"   rehearsal: {line}")


def differences(plan: Plan, found: Mapping[str, Any]) -> list[str]:
    """Return one line per measured quantity: measured, planned, and the difference if it is above a tenth."""
    per_token = plan.times.train_s / plan.work.step_tokens
    rows = [
        ("peak memory", plan.trainer_gib, found["peak_gib"], "GiB"),
        ("training", per_token * found["tokens"], found["train_s"], f"s for {found['tokens']:,.0f} tokens"),
    ]
    if found.get("sync_s") and plan.times.sync_s is not None:
        rows.append(("sync", plan.times.sync_s, found["sync_s"], "s"))
    lines = [
        f"{what} {measured:.3g} {unit}, planned {planned:.3g}: {_off(planned, measured)}"
        for what, planned, measured, unit in rows
    ]
    if found.get("verified"):
        lines.append(f"the version that the engine received is proven: {found['verified']}")
    return lines


def _off(planned: float, measured: float) -> str:
    off = measured / planned - 1 if planned else 0.0
    return "as planned" if abs(off) <= _NOTABLE else f"{off:+.0%}"


# --- in the child process


def planned_work(directory: Path) -> Work:
    """Return the work of one step, from the run's plan."""
    work = json.loads((directory / "plan.json").read_text(encoding="utf-8"))["work"]
    later = Micro(**work["later"]) if work["later"] else None
    return Work(**{**work, "micro": Micro(**work["micro"]), "later": later})


async def play(spec: RunSpec, work: Work, home: Path) -> dict[str, Any]:
    """Train and sync twice with the largest micro-batches; return the figures of the second time. `work`: from the
    plan. `home`: directory for the engine's files."""
    limit = getattr(getattr(spec, "engine", None), "max_context", 0)
    model = built_model.model(spec.model, spec.precision, spec.seed, built_model.settle_torch(spec), limit)
    algorithm = _algorithm(spec, model)
    proofs: list[Proof] = []
    joined = publisher = None
    if isinstance(spec, RlSpec) and not _elsewhere(spec):
        joined = run_engines.join(spec, model, home)
        call = training.caller(spec.deterministic and isinstance(spec.engine, HfEngineSpec))
        deadline_s = spec.sync.deadline_s
        publisher = run_engines.publisher(joined, model, deadline_s, call, proofs.append, lambda _: None)
    trainer = training.trainer(spec.train, model, algorithm, 0, spec.seed)
    groups = largest_groups(spec, work, model.num_ids)
    metrics: Mapping[str, float] = {}
    train_s = sync_s = 0.0
    try:
        for _ in range(2):  # twice, because the first one compiles
            if publisher is not None:
                await publisher.ensure_served(trainer)
                await publisher.rest(trainer)
            started = time.perf_counter()
            metrics = trainer.step(training.batches(spec.train, model, algorithm)(groups, trainer.version))
            train_s = time.perf_counter() - started
            if saves_between_steps(spec):
                trainer.snapshot()  # its memory stays allocated, as in the run
            if publisher is not None:
                started = time.perf_counter()
                await publisher.publish(trainer)
                sync_s = time.perf_counter() - started
    finally:
        if joined is not None:
            await joined.engine.close()
            joined.bridge.close()
    return {
        "peak_gib": metrics["memory/peak"], "tokens": metrics["tokens/computed"], "train_s": train_s,
        "sync_s": sync_s, "verified": proofs[-1].verified if proofs else "",
    }  # fmt: skip


def _elsewhere(spec: RlSpec) -> bool:
    """Return whether the run uses an engine that it does not own; a rehearsal must not change that engine's weights."""
    return isinstance(spec.engine, RemoteEngineSpec) or bool(getattr(spec.engine, "url", ""))


def _algorithm(spec: RunSpec, model: built_model.BuiltModel) -> Any:
    algorithm = training.algorithm_of(spec)
    if algorithm.needs_reference:
        set_reference(spec.algorithm, model, spec.precision)
    return algorithm


def largest_groups(spec: RunSpec, work: Work, num_ids: int) -> list[Group]:
    """Return groups of random tokens that fill two micro-batches (or the only one of a step); every sequence has the
    plan's greatest length."""
    rng = random.Random(spec.seed)
    labelled = isinstance(spec, PreferenceSpec) and spec.algorithm.kind == "kto"
    pairs = isinstance(spec, PreferenceSpec) and not labelled
    size = spec.train.group_size if isinstance(spec, RlSpec) else 2 if pairs else 1
    most = max(1, work.sequences // size)
    prompt = max(1, work.row_tokens - work.answer_tokens) if work.answer_tokens else 1
    unshared = isinstance(spec, RlSpec) and not work.micro.masked  # each sample has its own copy of the prompt
    group_tokens = work.row_tokens * size if unshared else prompt + size * (work.row_tokens - prompt)
    count = min(most, max(1, min(work.num_micro, 2) * work.micro.tokens // group_tokens))
    groups: list[Group] = []
    for _ in range(count):
        shared = _ids(rng, prompt, num_ids)
        played = size + labelled  # beside a labelled answer there is a mismatched one
        groups.append([_trajectory(shared, _ids(rng, work.row_tokens - prompt, num_ids), i) for i in range(played)])
    if isinstance(spec.algorithm, DistillSpec) and spec.algorithm.is_served:
        for each in chain.from_iterable(groups):
            each.teacher_logprobs = [0.0] * len(each.ids)
    return groups


def _trajectory(prompt: list[int], answer: list[int], number: int) -> Trajectory:
    trained = [False] * len(prompt) + [True] * len(answer)
    return Trajectory(
        prompt + answer, trained, [0.0] * len(trained), [NO_VERSION] * len(trained), reward=float(number % 2 == 0)
    )


def _ids(rng: random.Random, count: int, num_ids: int) -> list[int]:
    return [rng.randrange(num_ids) for _ in range(count)]


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    atomic_write.write_json(
        directory / _FILE, asyncio.run(play(spec_of(directory), planned_work(directory), directory / "rehearsal"))
    )
