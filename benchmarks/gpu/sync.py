"""Every mode with real vLLM on GPUs, shown correct: `python benchmarks/gpu/sync.py MODE[:TP] ... --shape qwen3-0.6b`.

For each mode: a random checkpoint of the shape, a trainer on the first GPU, vLLM with CUDA graphs behind `tandem engine
serve`, and VERSIONS versions whose weights differ. Each must be proven (digests or identity, cache epoch, canary), and
a batch sampled afterwards must agree with the trainer about its logprobs; a batch of the version before, scored with
this one, shows what a stale engine would look like. Details, and the logs of engines and ranks, go to $OUT, also when
SIGTERM ends it. `--backend` forces the way that `broadcast` and `adapter_broadcast` take, which `auto` chooses; under
`ipc` all is on one GPU.

`shared:2` is a trainer of two ranks on the GPUs of vLLM's two workers, which really trains: each version is a step on
the batch that was sampled before. Also reported: how long requests waited (the flip), what all GPUs had less while a
version was published, as a share of the weights, and what the trainer's GPU 0 had allocated before and after its
weights became the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tandem.build import built_model, run_engines, standalone_engines, training
from tandem.errors import TandemError
from tandem.ops.memory_meter import DeviceMemory
from tandem.recipes.crew import crew_of
from tandem.recipes.random_checkpoints import random_checkpoint
from tandem.spec.load import parse_spec, to_toml
from tandem.types import Proof, Sampling, Trajectory

VERSIONS, PROMPTS, TOKENS = 4, 16, 48
OF_RANKS = 9
"""Versions of a trainer of several ranks."""
OUT = Path(os.environ.get("OUT", "."))
BEGAN = time.perf_counter()


def note(text: str) -> None:
    print(f"  {time.perf_counter() - BEGAN:6.1f} s  {text}", flush=True)


def keep_logs(home: Path, name: str) -> None:
    for log in (*home.rglob("*.txt"), *home.rglob("*.log")):
        shutil.copyfile(log, OUT / f"{name}-{log.relative_to(home).as_posix()}".replace(":", "-").replace("/", "-"))


def spec_of(
    mode: str, backend: str, tensor_parallel: int, checkpoint: Path, python: str, *, digest: bool = False
) -> Any:
    engine: dict[str, Any] = {
        "kind": "vllm", "python": python, "max_context": 512, "memory_share": 0.4, "tensor_parallel": tensor_parallel,
    }  # fmt: skip
    if mode == "broadcast" and backend != "ipc":
        engine["gpus"] = list(range(1, 1 + tensor_parallel))
    sync: dict[str, Any] = {"bridge": mode, "retries": 0, "deadline_s": 120.0}
    if mode in ("broadcast", "adapter_broadcast"):
        sync["backend"] = backend
    if mode == "shared":
        sync["digest"] = digest
    model: dict[str, Any] = {"path": str(checkpoint)}
    train: dict[str, Any] = {
        "steps": 1, "lr": 1e-5, "groups_per_step": 1, "group_size": 2, "max_tokens": 8, "max_lag": 1,
    }  # fmt: skip
    ranks = tensor_parallel if mode == "shared" else 1
    if mode.startswith("adapter"):
        model["lora"] = {"rank": 16}
    if ranks > 1:
        model["activations"] = "selective"
        train |= {
            "steps": OF_RANKS, "lr": 2e-3, "max_lag": 0, "max_logprob_gap": 1.0, "micro_tokens": 2048,
            "optimizer": {"kind": "adamw_8bit"},
        }  # fmt: skip
    return parse_spec(
        {
            "recipe": "rl", "name": "sync", "device": "cuda", "deterministic": False, "model": model,
            "precision": {"weights": "bfloat16"}, "environment": {"name": "guess"}, "engine": engine,
            "sync": sync, "parallel": {"ranks": ranks, "deadline_s": 240.0}, "train": train,
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


def step(trainer: Any, make: Any, played: list[tuple[list[int], int, list[float]]]) -> None:
    """Of all ranks, on what was sampled with the version before."""
    group = [
        Trajectory(
            ids, [at >= first for at in range(len(ids))], [0.0] * first + logprobs,
            [-1] * first + [trainer.version] * len(logprobs), reward=float(number % 2),
        )
        for number, (ids, first, logprobs) in enumerate(played)
    ]  # fmt: skip
    row = trainer.step(make([group], trainer.version))
    assert not row["train/set_aside"], row


async def check(
    mode: str, backend: str, tensor_parallel: int, checkpoint: Path, python: str, home: Path, *, digest: bool
) -> dict[str, Any]:
    spec = spec_of(mode, backend, tensor_parallel, checkpoint, python, digest=digest)
    torch.cuda.empty_cache()
    home.mkdir(parents=True)
    (home / "spec.toml").write_text(to_toml(spec))  # the other ranks read it
    with ExitStack() as stack:
        return await of_crew(spec, mode, tensor_parallel, home, stack.enter_context(crew_of(spec, home)))


async def of_crew(spec: Any, mode: str, tensor_parallel: int, home: Path, crew: Any) -> dict[str, Any]:
    """`crew`: where several ranks train."""
    note("the trainer loads its model")
    model = built_model.run_model(spec, crew)
    note(f"it has it, on {spec.parallel.ranks} ranks; vLLM starts")
    joined = run_engines.join(spec, model, home, crew=crew)
    proofs: list[Proof] = []
    meetings: list[Any] = []

    def met(meeting: Any) -> None:
        note("vLLM has started and is attached" if not meetings else "attached")
        meetings.append(meeting)

    publisher = run_engines.publisher(joined, model, 120.0, asyncio.to_thread, proofs.append, met)
    algorithm = training.algorithm(spec.algorithm, 8)
    trainer = training.trainer(spec.train, model, algorithm, 0, 0)
    make = training.batches(spec.train, model, algorithm)
    extra_bytes: list[int] = []
    gaps: list[float] = []
    stale: list[float] = []
    played: Any = []  # under the version before
    started = time.perf_counter()
    try:
        allocated = [torch.cuda.memory_allocated()]
        await publisher.publish(trainer)
        note("the first version is proven")
        ready = time.perf_counter() - started
        allocated.append(torch.cuda.memory_allocated())
        for version in range(VERSIONS if crew is None else OF_RANKS):
            if version:
                await publisher.rest(trainer)
                if crew is None:
                    move(model, trainer)
                else:
                    await asyncio.to_thread(step, trainer, make, played)
                with DeviceMemory() as devices:
                    await publisher.publish(trainer)
                extra_bytes.append(devices.extra_bytes)
                stale.append(difference(trainer, played))
            mean, played = await gap(joined.engine, trainer, version)
            gaps.append(mean)
    finally:
        await joined.engine.close()
        joined.bridge.close()
    last = proofs[-1]
    (engine,) = meetings[0]["engines"]
    names = {part.name for part in trainer.export("full" if crew is None else "live").parts()}
    weight_bytes = 2 * sum(parameter.numel() for parameter in model.policy.module.parameters())
    return {
        "mode": mode, "tp": tensor_parallel, "verified": last.verified, "proofs": len(proofs),
        "transport": dict(last.transport), "tensors": last.tensors,
        "mapped": len(names & set(engine["layout"])), "of": len(names),
        "digests": [proof.digest for proof in proofs], "canary": [proof.logprob_gap for proof in proofs],
        "limit": last.gap_limit, "batch_gap": gaps, "stale_gap": stale, "start_s": ready,
        "ms": {name: round(seconds * 1e3, 2) for name, seconds in last.seconds.items()},
        "bytes": last.bytes_moved, "versions": engine.get("versions"),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "paused_ms": sorted(round(proof.seconds.get("paused", 0.0) * 1e3, 2) for proof in proofs[1:]),
        "extra_share": max(extra_bytes) / weight_bytes, "extra_mib": [each / 2**20 for each in extra_bytes],
        "allocated_gib": [each / 2**30 for each in allocated],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("modes", nargs="+")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--backend", default="auto", choices=["auto", "gloo", "nccl", "ipc"])
    parser.add_argument("--digest", action="store_true", help="both ends of `shared` also read the weights back")
    parser.add_argument("--python", default=standalone_engines.default_python())
    arguments = parser.parse_args()
    checkpoint = Path("/tmp") / arguments.shape
    if not checkpoint.exists():
        note(f"a random checkpoint is written to {checkpoint}")
        random_checkpoint(arguments.shape, checkpoint)
    rows = []
    for each in arguments.modes:
        mode, _, parallel = each.partition(":")
        home = Path("/tmp/sync") / f"{arguments.shape}-{each}".replace(":", "-")
        shutil.rmtree(home, ignore_errors=True)

        def ended(*_: object, home: Path = home, name: str = f"{arguments.shape}-{each}") -> None:
            keep_logs(home, name)
            sys.exit("ended by SIGTERM")

        signal.signal(signal.SIGTERM, ended)
        torch.cuda.reset_peak_memory_stats()
        try:
            backend, python = arguments.backend, arguments.python
            started = check(mode, backend, int(parallel or 1), checkpoint, python, home, digest=arguments.digest)
            row = asyncio.run(started)
            way = " ".join(filter(None, (row["transport"].get("engaged"), row["transport"].get("why")))) or "-"
            print(
                f"{arguments.shape:11} {each:18} {way:6} {row['verified']:9} {row['mapped']}/{row['of']} mapped, "
                f"canary {max(row['canary']):.4f} <= {row['limit']:.4f}, batch {max(row['batch_gap']):.4f}, stale "
                f"{min(row['stale_gap']):.4f}, {row['bytes']} bytes moved, paused {row['paused_ms']} ms, extra memory "
                f"{row['extra_share']:.2%} ({max(row['extra_mib']):.1f} MiB), allocated {row['allocated_gib']}, "
                f"{row['ms']}",
                flush=True,
            )
        except (TandemError, AssertionError) as error:
            row = {"mode": each, "error": f"{type(error).__name__}: {error}"}
            print(f"{arguments.shape:11} {each:18} FAILED {row['error'][:1500]}", flush=True)
        finally:
            keep_logs(home, f"{arguments.shape}-{each}")
        rows.append(row)
    (OUT / f"sync-{arguments.shape}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
