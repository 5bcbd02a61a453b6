"""Every mode with real vLLM on GPUs, shown correct: `python benchmarks/gpu/sync.py MODE[:TP] ... --shape qwen3-0.6b`.

For each mode: a random checkpoint of the shape, a trainer on the first GPU, vLLM with CUDA graphs behind `tandem engine
serve`, and VERSIONS versions whose weights differ. Each must be proven (digests or identity, cache epoch, canary), and
a batch sampled afterwards must agree with the trainer about its logprobs; a batch of the version before, scored with
this one, shows what a stale engine would look like. Details, and logs of what failed, go to $OUT. `--backend` forces
the way that `broadcast` and `adapter_broadcast` take, which `auto` chooses; under `ipc` all is on one GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from tandem.build import run_engines, standalone_engines, training
from tandem.errors import TandemError
from tandem.recipes.random_checkpoints import random_checkpoint
from tandem.spec.load import parse_spec
from tandem.types import Proof, Sampling

VERSIONS, PROMPTS, TOKENS = 4, 16, 48


def spec_of(mode: str, backend: str, tensor_parallel: int, checkpoint: Path, python: str) -> Any:
    engine: dict[str, Any] = {
        "kind": "vllm", "python": python, "max_context": 512, "memory_share": 0.4, "tensor_parallel": tensor_parallel,
    }  # fmt: skip
    if mode == "broadcast" and backend != "ipc":
        engine["gpus"] = list(range(1, 1 + tensor_parallel))
    sync: dict[str, Any] = {"bridge": mode, "retries": 0, "deadline_s": 120.0}
    if mode in ("broadcast", "adapter_broadcast"):
        sync["backend"] = backend
    model: dict[str, Any] = {"path": str(checkpoint)}
    if mode.startswith("adapter"):
        model["lora"] = {"rank": 16}
    return parse_spec(
        {
            "recipe": "rl", "name": "sync", "device": "cuda", "deterministic": False, "model": model,
            "precision": {"weights": "bfloat16"}, "environment": {"name": "guess"}, "engine": engine,
            "sync": sync,
            "train": {"steps": 1, "lr": 1e-5, "groups_per_step": 1, "group_size": 2, "max_tokens": 8, "max_lag": 1},
        }
    )  # fmt: skip


def move(model: Any, trainer: Any) -> None:
    """Enough that another version's logprobs are plainly others."""
    trainer.version += 1
    generator = torch.Generator("cuda").manual_seed(trainer.version)
    with torch.no_grad():
        for _, tensor in model.policy.trainable():
            if tensor.ndim > 1:
                noise = torch.randn(tensor.shape, generator=generator, device="cuda", dtype=tensor.dtype)
                tensor += noise * (0.02 if min(tensor.shape) <= 64 else 0.01)


async def gap(engine: Any, trainer: Any, seed: int) -> tuple[float, list[tuple[list[int], int, list[float]]]]:
    """Mean difference of logprobs, in nats, over a sampled batch; and the batch."""
    prompts = [[(seed * 31 + i * 7 + j * 13) % 250 for j in range(40 + i)] for i in range(PROMPTS)]
    sampling = [Sampling(max_tokens=TOKENS, temperature=1.0, seed=seed * 1000 + i) for i in range(PROMPTS)]
    answers = await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, sampling, strict=True)))
    assert all(set(answer.versions) == {trainer.version} for answer in answers), "a token of another version"
    played = [([*p, *a.ids], len(p), a.logprobs) for p, a in zip(prompts, answers, strict=True)]
    return difference(trainer, played), played


def difference(trainer: Any, played: list[tuple[list[int], int, list[float]]]) -> float:
    return statistics.fmean(
        abs(a - b) for ids, first, theirs in played for a, b in zip(trainer.score(ids, first), theirs, strict=True)
    )


async def check(
    mode: str, backend: str, tensor_parallel: int, checkpoint: Path, python: str, home: Path
) -> dict[str, Any]:
    spec = spec_of(mode, backend, tensor_parallel, checkpoint, python)
    torch.cuda.empty_cache()
    model = training.run_model(spec, None)
    joined = run_engines.join(spec, model, home)
    proofs: list[Proof] = []
    meetings: list[Any] = []
    publisher = run_engines.publisher(joined, model, 120.0, asyncio.to_thread, proofs.append, meetings.append)
    trainer = training.trainer(spec.train, model, training.algorithm(spec.algorithm, 8), 0, 0)
    gaps: list[float] = []
    stale: list[float] = []
    played: Any = []  # under the version before
    started = time.perf_counter()
    try:
        await publisher.publish(trainer)
        ready = time.perf_counter() - started
        for version in range(VERSIONS):
            if version:
                await publisher.rest(trainer)
                move(model, trainer)
                await publisher.publish(trainer)
                stale.append(difference(trainer, played))
            mean, played = await gap(joined.engine, trainer, version)
            gaps.append(mean)
    finally:
        await joined.engine.close()
        joined.bridge.close()
    last = proofs[-1]
    (engine,) = meetings[0]["engines"]
    names = {name for name, _ in trainer.export("full").tensors()}
    return {
        "mode": mode, "tp": tensor_parallel, "verified": last.verified, "proofs": len(proofs),
        "transport": dict(last.transport), "tensors": last.tensors,
        "mapped": len(names & set(engine["layout"])), "of": len(names),
        "digests": [proof.digest for proof in proofs], "canary": [proof.logprob_gap for proof in proofs],
        "limit": last.gap_limit, "batch_gap": gaps, "stale_gap": stale, "start_s": ready,
        "ms": {name: round(seconds * 1e3, 2) for name, seconds in last.seconds.items()},
        "bytes": last.bytes_moved, "versions": engine.get("versions"),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("modes", nargs="+")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--backend", default="auto", choices=["auto", "gloo", "nccl", "ipc"])
    parser.add_argument("--python", default=standalone_engines.default_python())
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    checkpoint = Path("/tmp") / arguments.shape
    if not checkpoint.exists():
        random_checkpoint(arguments.shape, checkpoint)
    rows = []
    for each in arguments.modes:
        mode, _, parallel = each.partition(":")
        home = Path("/tmp/sync") / f"{arguments.shape}-{each}".replace(":", "-")
        shutil.rmtree(home, ignore_errors=True)
        torch.cuda.reset_peak_memory_stats()
        try:
            backend, python = arguments.backend, arguments.python
            row = asyncio.run(check(mode, backend, int(parallel or 1), checkpoint, python, home))
            way = " ".join(filter(None, (row["transport"].get("engaged"), row["transport"].get("why")))) or "-"
            print(
                f"{arguments.shape:11} {each:18} {way:6} {row['verified']:9} {row['mapped']}/{row['of']} mapped, "
                f"canary {max(row['canary']):.4f} <= {row['limit']:.4f}, batch {max(row['batch_gap']):.4f}, stale "
                f"{min(row['stale_gap']):.4f}, {row['ms']}",
                flush=True,
            )
        except (TandemError, AssertionError) as error:
            row = {"mode": each, "error": f"{type(error).__name__}: {error}"}
            print(f"{arguments.shape:11} {each:18} FAILED {row['error'][:1500]}", flush=True)
            for log in sorted(home.rglob("*.txt")) + sorted(home.rglob("vllm.log")):
                shutil.copyfile(log, out / f"{arguments.shape}-{each}-{log.name}".replace(":", "-"))
        rows.append(row)
    (out / f"sync-{arguments.shape}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
