"""vLLM and the trainer on one GPU, with `engine.sleep = "free"`: `python benchmarks/gpu/sleep.py [disk] [adapter]`.

For each bridge: VERSIONS versions. The engine sleeps before each but the first, the GPU's memory is read while it is
awake, asleep, and with the new version; once it is woken without a version. Every version must be proven, and batches
sampled before and after must agree with the trainer, who finds a buffer of the freed size where the engine was. Needs
what sync.py needs; of a bridge with 0.6B most of the time is vLLM's start. Numbers go to $OUT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from sync import VERSIONS, difference, gap, move, spec_of

from tandem.build import run_engines, standalone_engines, training
from tandem.recipes.random_checkpoints import random_checkpoint
from tandem.types import Proof


def used_gib() -> float:
    """Of the GPU, by everybody. What the trainer's allocator keeps in reserve is given back first."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


async def timed_ms(work: Any) -> float:
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1e3


def fill(freed_gib: float) -> None:
    """As a step does: takes most of what was freed, writes all of it, and gives it back."""
    torch.full((int(freed_gib * 0.9 * 2**30),), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


async def check(mode: str, checkpoint: Path, python: str, home: Path) -> dict[str, Any]:
    spec = spec_of(mode, "auto", 1, checkpoint, python)
    spec = spec.model_copy(update={"engine": spec.engine.model_copy(update={"sleep": "free"})})
    model = training.model(spec.model, spec.precision, 0, training.settle_torch(spec))
    joined = run_engines.join(spec, model, home)
    proofs: list[Proof] = []
    meetings: list[Any] = []
    publisher = run_engines.publisher(joined, model, 120.0, asyncio.to_thread, proofs.append, meetings.append)
    trainer = training.trainer(spec.train, model, training.algorithm(spec.algorithm, 8), 0, 0)
    row: dict[str, Any] = {"mode": mode, "alone_gib": used_gib(), "awake": [], "asleep": [], "again": []}
    row |= {"sleep_ms": [], "wake_ms": [], "batch_gap": [], "stale_gap": []}
    try:
        row["start_s"] = await timed_ms(publisher.publish(trainer)) / 1e3
        (row["engine"],) = (each.get("sleep") for each in meetings[0]["engines"])
        mean, played = await gap(joined.engine, trainer, 0)
        row["batch_gap"].append(mean)
        for version in range(1, VERSIONS):
            row["awake"].append(used_gib())
            row["sleep_ms"].append(await timed_ms(publisher.rest(trainer)))
            row["asleep"].append(used_gib())
            fill(row["awake"][-1] - row["asleep"][-1])
            if version == 1:  # as between two syncs: the same weights, from the host
                row["wake_alone_ms"] = await timed_ms(publisher.go_on())
                row["woken_gap"], _ = await gap(joined.engine, trainer, 0)
                await publisher.rest(trainer)
                fill(row["awake"][-1] - row["asleep"][-1])
            move(model, trainer)
            row["publish_ms"] = await timed_ms(publisher.publish(trainer))
            row["wake_ms"].append(proofs[-1].seconds["wake"] * 1e3)
            row["again"].append(used_gib())
            row["stale_gap"].append(difference(trainer, played))
            mean, played = await gap(joined.engine, trainer, version)
            row["batch_gap"].append(mean)
    finally:
        await joined.engine.close()
        joined.bridge.close()
    last = proofs[-1]
    row |= {"verified": last.verified, "proofs": len(proofs), "lent_gib": last.lent_bytes / 2**30}
    row |= {"canary": [proof.logprob_gap for proof in proofs], "limit": last.gap_limit, "seconds": dict(last.seconds)}
    assert row["engine"] == {"requested": "free", "engaged": True, "why_not": ""}, row["engine"]
    assert max(*row["batch_gap"], row["woken_gap"]) < min(row["stale_gap"]) / 2, "what was sampled is another model's"
    assert min(a - b for a, b in zip(row["awake"], row["asleep"], strict=True)) > 0.8 * row["lent_gib"] > 0
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("modes", nargs="*", default=["disk"])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--python", default=standalone_engines.default_python())
    arguments = parser.parse_args()
    out, checkpoint = Path(os.environ.get("OUT", ".")), Path("/tmp") / arguments.shape
    if not checkpoint.exists():
        random_checkpoint(arguments.shape, checkpoint)
    rows: list[Any] = []
    for mode in arguments.modes:
        home = Path("/tmp/sleep") / f"{arguments.shape}-{mode}"
        shutil.rmtree(home, ignore_errors=True)
        try:
            row = asyncio.run(check(mode, checkpoint, arguments.python, home))
            print(
                f"{arguments.shape} {mode:8} {row['verified']} x{row['proofs']}, GiB used: alone "
                f"{row['alone_gib']:.1f}, awake {row['awake'][-1]:.1f}, asleep {row['asleep'][-1]:.1f}, again "
                f"{row['again'][-1]:.1f}; ms: sleep "
                f"{[round(ms) for ms in row['sleep_ms']]}, wake {[round(ms) for ms in row['wake_ms']]}, without a "
                f"version {row['wake_alone_ms']:.0f}; batch {max(row['batch_gap']):.4f}, woken {row['woken_gap']:.4f}, "
                f"stale {min(row['stale_gap']):.4f}, canary {max(row['canary']):.4f} <= {row['limit']:.4f}",
                flush=True,
            )
        except Exception as error:  # noqa: BLE001  the next bridge is tried all the same
            row = {"mode": mode, "error": f"{type(error).__name__}: {error}"}
            print(f"{arguments.shape} {mode:8} FAILED {row['error'][:1500]}", flush=True)
            for log in sorted(home.rglob("*.txt")) + sorted(home.rglob("vllm.log")):
                shutil.copyfile(log, out / f"sleep-{mode}-{log.name}")
        rows.append(row)
    (out / f"sleep-{arguments.shape}.json").write_text(json.dumps(rows, indent=1))
    raise SystemExit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
