"""How long a version takes: `python benchmarks/gpu/sync_fast.py shared disk adapter --shape qwen3-1.7b`.

A random checkpoint of the shape, a trainer on the first GPU, vLLM behind `tandem engine serve` on `--gpu`, and versions
that differ, each of them proven. One vLLM for all bridges of whole weights, one with adapters for theirs, and one of
its own for `restart`. After WARM versions, medians of ROUNDS: `paused`, as long as requests waited; `sync`, from asking
for the version to its proof without the canary; the phases; and the canary apart. Memory: what each GPU has less than
before the first of them. Beside a broadcast to another GPU: what NCCL itself takes for the bytes. Of adapters also:
until the first token under a new one, and with `--streams 64` tokens/s of so many, under it and from the base (asked
before any version came). Details: $OUT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from standing import ask_for_checkpoint, checkpoint_of, standing, used_bytes
from sync import difference, gap

from tandem.build import built_model, run_engines, standalone_engines, training
from tandem.engine.server.engine import ExistingServer, ServerEngine
from tandem.errors import TandemError
from tandem.spec.load import parse_spec
from tandem.types import Proof, Sampling

WARM, ROUNDS = 2, 8
TOKENS = 256


def engine_of(arguments: Any) -> dict[str, Any]:
    asked = {
        "kind": "vllm", "python": arguments.python, "max_context": 512, "memory_share": arguments.share,
        "eager": arguments.eager,
    }  # fmt: skip
    return asked | ({"gpus": [arguments.gpu]} if arguments.gpu else {})


def spec_of(mode: str, checkpoint: Path, engine: dict[str, Any], arguments: Any) -> Any:
    sync: dict[str, Any] = {"bridge": mode, "retries": 0, "deadline_s": 120.0}
    if mode in ("disk", "restart", "adapter") and arguments.directory:
        sync["directory"] = arguments.directory
    if "broadcast" in mode:
        sync["backend"] = arguments.backend
    if mode == "shared":
        sync["digest"] = arguments.digest
    model: dict[str, Any] = {"path": str(checkpoint)}
    if mode.startswith("adapter"):
        model["lora"] = {"rank": 16}
    return parse_spec(
        {
            "recipe": "rl", "name": "sync", "device": arguments.device, "deterministic": False, "model": model,
            "precision": {"weights": "bfloat16"}, "environment": {"name": "guess"}, "engine": engine, "sync": sync,
            # Weights at random say everything with less certainty than any model: the two ends round further apart.
            "train": {
                "steps": 1, "lr": 1e-5, "groups_per_step": 1, "group_size": 2, "max_tokens": 8, "max_lag": 1,
                "max_logprob_gap": 0.3, "optimizer": {"kind": "apollo_mini"},  # no step is taken
            },
        }
    )  # fmt: skip


def nudge(model: Any, trainer: Any) -> None:
    """Another version, of weights that stay of one size however many come: what is added to one is taken from the
    next. (bfloat16 rounds: no two are the same.)"""
    trainer.version += 1
    generator = torch.Generator(model.device).manual_seed((trainer.version - 1) // 2)
    sign = 1 if trainer.version % 2 else -1
    with torch.no_grad():
        for _, tensor in model.policy.trainable():
            if tensor.ndim > 1:
                noise = torch.randn(tensor.shape, generator=generator, device=model.device, dtype=tensor.dtype)
                tensor += noise * (sign * (0.008 if min(tensor.shape) <= 64 else 0.003))


async def first_token_ms(engine: Any, seed: int) -> float:
    started = time.perf_counter()
    await engine.generate([seed % 200 + 5] * 32, Sampling(max_tokens=1, temperature=1.0, seed=seed))
    return (time.perf_counter() - started) * 1e3


async def tokens_per_s(engine: Any, streams: int, seed: int) -> float:
    sampling = [Sampling(max_tokens=TOKENS, temperature=1.0, seed=seed * 1000 + n) for n in range(streams)]
    prompts = [[(seed * 31 + n * 7 + j * 13) % 250 for j in range(128)] for n in range(streams)]
    started = time.perf_counter()
    answers = await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, sampling, strict=True)))
    return sum(len(each.ids) for each in answers) / (time.perf_counter() - started)


def raw_nccl_ms(size_bytes: int) -> float:
    """One flat buffer from the first GPU to the second, in one process."""
    import torch.cuda.nccl as nccl

    buffers = [torch.ones(size_bytes, dtype=torch.uint8, device=torch.device("cuda", n)) for n in range(2)]
    times: list[float] = []
    for _ in range(8):
        started = time.perf_counter()
        nccl.broadcast(buffers)
        for n in range(2):
            torch.cuda.synchronize(n)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[2:])


async def of_the_base(engine: dict[str, Any], streams: int) -> list[int]:
    """Tokens/s of many streams, before any version came."""
    asked = ServerEngine(ExistingServer(engine["url"], Path(engine["token_file"])))
    try:
        return [round(await tokens_per_s(asked, streams, seed)) for seed in range(4)][1:]
    finally:
        await asked.close()


async def measure(mode: str, checkpoint: Path, engine: dict[str, Any], home: Path, arguments: Any) -> dict[str, Any]:
    spec = spec_of(mode, checkpoint, engine, arguments)
    began = time.perf_counter()
    model = built_model.run_model(spec, None)
    joined = run_engines.join(spec, model, home)
    proofs: list[Proof] = []
    publisher = run_engines.publisher(joined, model, 600.0, asyncio.to_thread, proofs.append)
    trainer = training.trainer(spec.train, model, training.algorithm(spec.algorithm, 8), 0, 0)
    row: dict[str, Any] = {"mode": mode, "shape": checkpoint.name, "first_token": [], "with_ms": []}
    try:
        loaded_s = time.perf_counter() - began
        await publisher.publish(trainer)
        row["start_s"] = [loaded_s, time.perf_counter() - began - loaded_s]
        before = used_bytes()
        for version in range(1 if mode == "restart" else WARM + ROUNDS):
            if mode == "shared":
                await publisher.rest(trainer)
            nudge(model, trainer)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            await publisher.publish(trainer)
            row["with_ms"].append((time.perf_counter() - started) * 1e3)
            row["first_token"].append(await first_token_ms(joined.engine, version))
        row["more_mib"] = [(now - was) / 2**20 for now, was in zip(used_bytes(), before, strict=True)]
        row["gap"], played = await gap(joined.engine, trainer, 7)
        if mode == "shared":
            await publisher.rest(trainer)
        nudge(model, trainer)
        await publisher.publish(trainer)
        row["stale"] = difference(trainer, played)
        if mode.startswith("adapter") and arguments.streams:
            rates = [await tokens_per_s(joined.engine, arguments.streams, seed) for seed in range(4, 8)]
            row["tokens_per_s"] = [round(rate) for rate in rates[1:]]
    finally:
        await joined.engine.close()
        joined.bridge.close()
    rounds = proofs[1 + WARM : 1 + WARM + ROUNDS] or proofs[1:]
    names = list(dict.fromkeys(name for proof in rounds for name in proof.seconds))
    middle = {name: statistics.median(p.seconds.get(name, 0.0) for p in rounds) * 1e3 for name in names}
    syncs = [(p.seconds["total"] - p.seconds["canary"]) * 1e3 for p in rounds]
    row |= {
        "verified": sorted({p.verified for p in proofs}), "rounds": len(rounds), "bytes": rounds[-1].bytes_moved,
        "transport": dict(rounds[-1].transport), "canary_gap": max(p.logprob_gap for p in proofs),
        "digests": len({p.digest for p in proofs}), "sync_ms": [min(syncs), statistics.median(syncs), max(syncs)],
        "ms": {name: round(took, 2) for name, took in middle.items()},
        "paused_ms": sorted(round(p.seconds.get("paused", 0.0) * 1e3, 2) for p in rounds),
    }  # fmt: skip
    return row


def told(row: dict[str, Any]) -> str:
    low, middle, high = row["sync_ms"]
    way = row["transport"].get("engaged", "")
    first = statistics.median(row["first_token"][-ROUNDS:])
    parts = [
        f"{row['mode']:17} {row['shape']:10} {way:6} {row['verified']} {row['rounds']}x",
        f"paused {row['ms'].get('paused', 0.0):.1f} ms ({row['paused_ms'][0]}-{row['paused_ms'][-1]})",
        f"sync {middle:.1f} ms ({low:.1f}-{high:.1f})", f"canary {row['ms']['canary']:.1f}", f"token {first:.1f}",
        f"memory +{row['more_mib']} MiB", f"gap {row['gap']:.4f} stale {row['stale']:.4f}",
        f"start {[round(s, 1) for s in row['start_s']]} s",
    ]  # fmt: skip
    parts += [f"{row['tokens_per_s']} tokens/s, base {row['base_tokens_per_s']}"] if "tokens_per_s" in row else []
    parts += [f"NCCL alone {row['nccl_ms']:.1f} ms"] if "nccl_ms" in row else []
    return "\n    ".join([", ".join(parts), json.dumps(row["ms"])])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("modes", nargs="+")
    ask_for_checkpoint(parser)
    parser.add_argument("--gpu", type=int, default=0, help="vLLM's")
    parser.add_argument("--python", default=standalone_engines.default_python())
    parser.add_argument("--share", type=float, default=0.4, help="of the GPU's memory, for vLLM")
    parser.add_argument("--backend", default="auto", choices=["auto", "gloo", "nccl", "ipc"], help="of broadcasts")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--digest", action="store_true", help="both ends of `shared` also read the weights back")
    parser.add_argument("--directory", default="", help="where disk, restart and adapter put their files")
    parser.add_argument("--streams", type=int, default=0, help="also tokens/s of so many, base and adapter")
    arguments = parser.parse_args()
    out, rows = Path(os.environ.get("OUT", ".")), list[dict[str, Any]]()
    checkpoint = checkpoint_of(arguments)
    adapters = [mode for mode in arguments.modes if mode.startswith("adapter")]
    alone = [mode for mode in arguments.modes if mode == "restart"]
    whole = [mode for mode in arguments.modes if mode not in adapters + alone]
    for modes, more in ((whole, ()), (adapters, ("--adapter-slots", "3"))):
        if modes:
            home = Path("/tmp/sync-fast") / f"{checkpoint.name}-{modes[0]}"
            shutil.rmtree(home, ignore_errors=True)
            asked = engine_of(arguments)
            with standing(asked, checkpoint, home / "engine", device=arguments.device, more=more) as engine:
                base = asyncio.run(of_the_base(engine, arguments.streams)) if more and arguments.streams else []
                for mode in modes:
                    rows.append(tried(mode, checkpoint, engine, home / mode, arguments, base))
            keep(home, out)
    for mode in alone:
        home = Path("/tmp/sync-fast") / f"{checkpoint.name}-{mode}"
        shutil.rmtree(home, ignore_errors=True)
        rows.append(tried(mode, checkpoint, engine_of(arguments), home, arguments))
        keep(home, out)
    (out / f"sync-fast-{checkpoint.name}.json").write_text(json.dumps(rows, indent=1))


def tried(
    mode: str, checkpoint: Path, engine: dict[str, Any], home: Path, arguments: Any, base: Sequence[int] = ()
) -> dict[str, Any]:
    try:
        row = {"base_tokens_per_s": base} | asyncio.run(measure(mode, checkpoint, engine, home, arguments))
        torch.cuda.empty_cache()
        if mode == "broadcast" and arguments.gpu:
            row["nccl_ms"] = raw_nccl_ms(row["bytes"])
        print(told(row), flush=True)
    except (TandemError, AssertionError, RuntimeError) as error:
        row = {"mode": mode, "error": f"{type(error).__name__}: {error}"}
        print(f"{mode} FAILED {row['error'][:1500]}", flush=True)
    return row


def keep(home: Path, out: Path) -> None:
    for log in home.rglob("*.log"):
        shutil.copyfile(log, out / f"{home.name}-{log.name}")


if __name__ == "__main__":
    main()
