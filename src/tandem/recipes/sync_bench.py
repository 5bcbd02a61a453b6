"""`tandem sync bench`: measure what each bridge costs on this machine, with real trainers and engines.

Each row does what a run would do: it has the trainer's own policy, the engine in its own process (except `inproc`), the
bridge, and the publisher with its canary. In each round every trained tensor changes a little, then the version is
published. The first publication attaches the engine and warms up; it is not counted.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, cast

from tandem.errors import SpecError, TandemError
from tandem.obs.sync_bench_report import Bench, BenchRow
from tandem.obs.sync_report import ONE_AFTER_THE_OTHER
from tandem.protocols import Trainer
from tandem.spec.bridges import BRIDGES
from tandem.spec.engine import HfEngineSpec
from tandem.spec.load import parse_spec
from tandem.spec.run import RlSpec
from tandem.types import Proof

if TYPE_CHECKING:
    from tandem.build.built_model import BuiltModel

SHAPES = ("tiny", "small", "medium", "qwen3-0.6b", "qwen3-1.7b")
ON_ANY_DEVICE = "disk"  # a bridge that every machine can run
_MOVE, _MOVED = 1e-3, 2**20  # standard deviation of a weight's change; about so many of a tensor change


def bench_sync(
    shape: str = "tiny",
    bridges: Sequence[str] = (),
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    engine: Literal["auto", "server", "vllm"] = "auto",
    rounds: int = 5,
    python: str | Path = "",
    options: Mapping[str, Any] | None = None,
    unchecked: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Bench:
    """Measure `bridges`; by default all. `engine`: the engine in the other process; auto takes vLLM on a GPU. `python`:
    vLLM's interpreter; default: the installed one. `unchecked`: accept any vLLM version. `options`: further fields of
    the spec's [engine] table, such as start_deadline_s."""
    if shape not in SHAPES:
        raise SpecError(f"--shape = '{shape}': there are {', '.join(SHAPES)}")
    if odd := [name for name in bridges if name not in BRIDGES]:
        raise SpecError(f"--bridge = '{odd[0]}': there are {', '.join(BRIDGES)}")
    from tandem.build import built_model
    from tandem.ops.memory_meter import copy_bytes_per_s

    picked = built_model.pick_device(device).type
    kind = ("vllm" if picked == "cuda" else "server") if engine == "auto" else engine
    link, other = _link(picked)
    link_bytes_per_s = copy_bytes_per_s(picked, other)
    rows: list[BenchRow] = []
    parameters = 0
    options = {**({"python": str(python)} if python else {}), **(options or {})}
    with tempfile.TemporaryDirectory(prefix="tandem-sync-bench-") as home:
        bench_spec(
            ON_ANY_DEVICE, "tiny", picked, kind, Path(home), options
        )  # refuses wrong options at once, not for each bridge
        for name in bridges or BRIDGES:
            tell(f"{name} ...")
            row, counted = _row(name, shape, picked, kind, rounds, link_bytes_per_s, Path(home), options, unchecked)
            tell(f"{name}: {row.skipped or row.error or f'{row.ms:.1f} ms, {row.how}'}")
            rows.append(row)
            _let_go()
            parameters = max(parameters, counted)
    return Bench(picked, shape, parameters, link, link_bytes_per_s / 1e9, tuple(rows))


def _let_go() -> None:
    """Free the memory of the last model before the next one is made."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _link(device: str) -> tuple[str, str]:
    """Return the fastest path for bytes on this machine, in words, and the device that a copy over it ends on."""
    import torch

    if device == "cuda" and torch.cuda.device_count() > 1:
        return "one copy from the first GPU to the second", "cuda:1"
    return f"one copy within the {'GPU' if device == 'cuda' else 'machine'}'s memory, by one call", device


def _row(
    name: str,
    shape: str,
    device: str,
    kind: str,
    rounds: int,
    link_bytes_per_s: float,
    home: Path,
    options: Mapping[str, Any],
    unchecked: bool,
) -> tuple[BenchRow, int]:
    """Measure one bridge; return its row and the number of the model's parameters."""
    from tandem.build import built_model

    row = BenchRow(name, _engine_kind(name, kind))
    if why_not := _why_not(name, device):
        return replace(row, skipped=why_not), 0
    try:
        spec = bench_spec(name, shape, device, kind, home, options)
    except SpecError as error:
        return replace(row, skipped=str(error)), 0
    model = built_model.model(spec.model, spec.precision, spec.seed, built_model.settle_torch(spec))
    parameters = sum(tensor.numel() for name, tensor in model.policy.module.named_parameters() if ".lora_" not in name)
    try:
        # With a bridge that restarts the engine, each round starts a process, and the warm-up starts two.
        times = 1 if BRIDGES[name].restarts_engine else rounds
        measured = asyncio.run(_publish(spec, model, times, home / name, unchecked))
    except (TandemError, RuntimeError) as error:  # RuntimeError: torch's own, out of memory for one
        return replace(row, error=f"{type(error).__name__}: {error}"), parameters
    return summed_up(row, *measured, link_bytes_per_s), parameters


def _why_not(name: str, device: str) -> str:
    """Return why this machine cannot run that bridge; empty if it can."""
    import torch

    if device == "cuda" and BRIDGES[name].separate_gpus and torch.cuda.device_count() < 2:
        return "trainer and engine need different GPUs, and there is one; 'shared' works with one"
    return ""


def _engine_kind(name: str, kind: str) -> str:
    """Return the engine's kind for a bridge. `kind`: of the engine in the other process."""
    return "hf" if BRIDGES[name].in_process else kind


def bench_spec(
    name: str, shape: str, device: str, kind: str, home: Path, options: Mapping[str, Any] | None = None
) -> RlSpec:
    """Return the spec of a whole run; the benchmark uses only its parts that concern weights."""
    model: dict[str, Any] = {"preset": shape} if "-" not in shape else {"path": str(_checkpoint(shape, home))}
    traits = BRIDGES[name]
    engine: dict[str, Any] = {"kind": _engine_kind(name, kind), "max_context": 256}
    if kind == "vllm" and not traits.in_process:
        engine["memory_share"] = 0.5  # the trainer takes its memory first
    if kind == "vllm" and traits.separate_gpus:
        engine["gpus"] = [1]
    if not traits.in_process:
        engine |= options or {}
    raw = {
        "recipe": "rl",
        "name": "sync-bench",
        "device": device,
        "model": {**model, "lora": {"rank": 16}} if traits.carries == "adapter" else model,
        "precision": {"weights": "bfloat16", "master": "split"} if device == "cuda" else {"weights": "float32"},
        "environment": {"name": "guess"},
        "engine": engine,
        # No retry: a failed round must be reported.
        "sync": {"bridge": name, "retries": 0},
        "train": {"steps": 1, "lr": 1e-5, "groups_per_step": 1, "group_size": 2, "max_tokens": 8},
    }
    return cast("RlSpec", parse_spec(raw))


def _checkpoint(shape: str, home: Path) -> Path:
    from tandem.recipes.random_checkpoints import random_checkpoint

    path = home / shape
    if not path.exists():
        random_checkpoint(shape, path)
    return path


# --- the rounds


async def _publish(
    spec: RlSpec, model: BuiltModel, rounds: int, home: Path, unchecked: bool
) -> tuple[list[Proof], float | None]:
    """Publish all rounds; return their proofs and the extra memory in bytes."""
    from tandem.build import run_engines, training
    from tandem.ops.memory_meter import DeviceMemory, ProcessMemory

    proofs: list[Proof] = []
    joined = run_engines.join(spec, model, home, unchecked=unchecked)
    call = training.caller(spec.deterministic and isinstance(spec.engine, HfEngineSpec))
    publisher = run_engines.publisher(joined, model, spec.sync.deadline_s, call, proofs.append)
    trainer = training.trainer(spec.train, model, training.algorithm(spec.algorithm, 8), 0, spec.seed)
    on_gpu = model.device.type == "cuda"
    extra: list[int | None] = []
    try:
        if on_gpu:  # attach before measuring: allocators keep memory that they took once
            await joined.engine.attach(joined.bridge.source(joined.engine.receivers))
        with DeviceMemory() if on_gpu else nullcontext() as devices:
            await publisher.publish(trainer)
            for _ in range(rounds):
                await publisher.rest(trainer)
                async with publisher.lock:
                    move_weights(model, trainer)
                processes = ProcessMemory()
                await publisher.publish(trainer)
                extra.append(processes.extra_bytes())
    finally:
        await joined.engine.close()
        joined.bridge.close()
    return proofs[1:], devices.extra_bytes if devices is not None else _median(extra)


def move_weights(model: BuiltModel, trainer: Trainer) -> None:
    """Change some weights of every trained tensor, as little as an optimizer step does but without its memory."""
    import torch

    trainer.version += 1
    generator = torch.Generator(model.device).manual_seed(trainer.version)
    with torch.no_grad():
        for _, tensor in model.policy.trainable():
            rows = torch.atleast_1d(tensor)  # not one flat view: memory that an engine lends may lie transposed
            some = rows[: max(1, _MOVED * len(rows) // max(1, rows.numel()))]
            some += _MOVE * torch.randn(some.shape, generator=generator, device=some.device, dtype=some.dtype)


# --- figures


def summed_up(row: BenchRow, proofs: Sequence[Proof], extra_bytes: float | None, link_bytes_per_s: float) -> BenchRow:
    middle = sorted(proofs, key=lambda proof: proof.seconds["total"])[(len(proofs) - 1) // 2]
    seconds = dict(middle.seconds)  # all from one round, so that they add up
    total_s = seconds.pop("total")
    moved = middle.bytes_moved
    in_turn_s = sum(seconds.get(phase, 0.0) for phase in ONE_AFTER_THE_OTHER)
    bytes_per_s = moved / (total_s - seconds["canary"]) if moved else None
    return replace(
        row,
        verified=_sound(proofs),
        how=proofs[0].verified,
        rounds=len(proofs),
        tensors=proofs[0].tensors,
        bytes=moved,
        ms=total_s * 1e3,
        phases={phase: took * 1e3 for phase, took in seconds.items()},
        rest_ms=(total_s - in_turn_s) * 1e3,
        gb_s=None if bytes_per_s is None else bytes_per_s / 1e9,
        link_share=None if bytes_per_s is None else bytes_per_s / link_bytes_per_s,
        extra_mib=None if extra_bytes is None else extra_bytes / 2**20,
        gap=max(proof.logprob_gap for proof in proofs),
    )


def _sound(proofs: Sequence[Proof]) -> bool:
    """Return whether all proofs hold. The weights change each round, so equal digests mean that old ones were sent."""
    fresh = len({proof.digest for proof in proofs}) == len(proofs) or proofs[0].verified == "identity"
    asked = all(proof.canary_tokens and proof.logprob_gap <= proof.gap_limit for proof in proofs)
    return fresh and asked and all(proof.verified != "none" for proof in proofs)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
