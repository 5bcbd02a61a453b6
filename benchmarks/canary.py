"""Measures on a real model whether the canary keeps quiet about a healthy engine and notices a wrong one.

    python benchmarks/canary.py MODEL [--device cuda] [--runs 20] [--only disk:bfloat16:full ...]

MODEL: a Hugging Face directory (`benchmarks/real_model.py` writes one). A row is one bridge, type and kind of training.
A run publishes the untrained model and a few versions after it, each one real training step away from the last. Each
run has its own data and a publisher of its own, so that its limit is measured again. An alarm in a run is false. Then
faults are planted: the engine's weights are right by every digest, and the trainer scores with

    stale    the weights that the run began with      rope     another base of the rotary embedding
    shifted  one matrix, moved by one row             scale    one matrix twice as large; a LoRA scaled twice

Each fault must be refused at a fresh publisher's first sync, when it has no limit yet. `batch` is the gap of sampled
tokens, which train.max_logprob_gap is about. Exit code 1 after a false alarm or a missed fault.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from common import note, table
from tandem.build import built_model, run_engines, training
from tandem.errors import LogprobGap
from tandem.rollout.recorded_producer import record
from tandem.spec.load import parse_spec
from tandem.spec.run import RlSpec
from tandem.spec.train import SftStage
from tandem.types import Message, Proof, Sampling

ON_CPU = (
    "inproc:float32:full", "inproc:bfloat16:full", "disk:float32:full", "disk:bfloat16:full",
    "broadcast:float32:full", "broadcast:bfloat16:full", "inproc:bfloat16:lora", "adapter:float32:lora",
    "adapter:bfloat16:lora",
)  # fmt: skip
ON_CUDA = ("shared:bfloat16:full", "broadcast:bfloat16:full", "disk:bfloat16:full", "adapter_broadcast:bfloat16:lora")
SHORTEST = 8
OF_VLLM = {"memory_share": 0.1, "arguments": ["--kv-cache-memory-bytes", str(2**32)]}  # so that rows may run at once


def spec_of(row: str, model: Path, device: str, home: Path) -> RlSpec:
    bridge, weights, kind = row.split(":")
    engine = "hf" if bridge == "inproc" else "vllm" if device == "cuda" else "server"
    raw: dict[str, Any] = {
        "recipe": "rl", "device": device, "environment": {"name": "arithmetic"},
        "sync": {"bridge": bridge, "retries": 0},
        "model": {"path": str(model), **({"lora": {"rank": 16}} if kind == "lora" else {})},
        "precision": {"weights": weights, **({"master": "split"} if weights == "bfloat16" else {})},
        "engine": {"kind": engine, "max_context": 512, **(OF_VLLM if engine == "vllm" else {})},
        "train": {"steps": 1, "lr": 1e-5, "groups_per_step": 1, "group_size": 2, "max_tokens": 32},
    }  # fmt: skip
    return cast("RlSpec", parse_spec(raw))


def questions(rng: random.Random) -> list[list[Message]]:
    return [
        [{"role": "user", "content": f"What is {rng.randrange(100)} + {rng.randrange(100)}? Explain it in a sentence."}]
        for _ in range(4)
    ]


# --- faults


@contextmanager
def changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.copy_(change(tensor))
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(before)


@contextmanager
def stale(module: Any, start: dict[str, torch.Tensor]) -> Iterator[None]:
    named = dict(module.named_parameters())
    now = {name: named[name].detach().clone() for name in start}
    with torch.no_grad():
        for name, tensor in start.items():
            named[name].copy_(tensor)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in now.items():
                named[name].copy_(tensor)


def matrix(module: Any, name: str) -> torch.Tensor:
    """A projection of the layer in the middle."""
    found = [
        w for path, w in module.named_parameters() if name in path and path.endswith("weight") and "lora" not in path
    ]
    return found[len(found) // 2]


@contextmanager
def other_rope(module: Any) -> Iterator[None]:
    """The base of the rotary embedding, ten times as large."""
    tables = [part.inv_freq for part in module.modules() if getattr(part, "inv_freq", None) is not None]
    before = [each.clone() for each in tables]
    for each in tables:
        share = torch.arange(len(each), device=each.device) / len(each)
        each.mul_(10.0**-share)
    try:
        yield
    finally:
        for each, old in zip(tables, before, strict=True):
            each.copy_(old)


@contextmanager
def lora_twice(module: Any) -> Iterator[None]:
    scalings = [part.scaling for part in module.modules() if isinstance(getattr(part, "scaling", None), dict)]
    for each in scalings:
        for name in each:
            each[name] *= 2
    try:
        yield
    finally:
        for each in scalings:
            for name in each:
                each[name] /= 2


def faults(module: Any, start: dict[str, torch.Tensor], kind: str) -> dict[str, Callable[[], Any]]:
    return {
        "stale": lambda: stale(module, start),
        "shifted": lambda: changed(matrix(module, "q_proj"), lambda w: w.roll(1, 0)),
        "rope": lambda: other_rope(module),
        "scale": lambda: (
            lora_twice(module) if kind == "lora" else changed(matrix(module, "down_proj"), lambda w: 2 * w)
        ),
    }


class Planted:
    """A trainer whose scores are of other weights than it sends."""

    def __init__(self, trainer: Any, fault: Callable[[], Any]) -> None:
        self._trainer, self._fault = trainer, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def score(self, ids: Any, first: int) -> list[float]:
        with self._fault():
            return self._trainer.score(ids, first)


# --- runs


async def batch_gap(
    engine: Any, trainer: Any, model: built_model.BuiltModel, asked: list[list[Message]], call: Any
) -> float:
    prompts = [model.renderer.prompt(each) for each in asked]
    sampling = [Sampling(max_tokens=32, temperature=1.0, seed=seed) for seed in range(len(prompts))]
    said = await asyncio.gather(*(engine.generate(*pair) for pair in zip(prompts, sampling, strict=True)))
    gaps: list[float] = []
    for prompt, answer in zip(prompts, said, strict=True):
        ours = await call(trainer.score, [*prompt, *answer.ids], len(prompt))
        gaps += [abs(a - b) for a, b in zip(ours, answer.logprobs, strict=True)]
    return statistics.fmean(gaps)


async def one_row(row: str, options: argparse.Namespace, home: Path) -> tuple[list[str], bool]:
    spec = spec_of(row, options.model, options.device, home)
    kind = row.split(":")[2]
    model = built_model.model(spec.model, spec.precision, 0, built_model.settle_torch(spec), 512)
    joined = run_engines.join(spec, model, home)
    start = {name: tensor.detach().clone() for name, tensor in model.policy.trainable()}
    named = dict(model.policy.trainable())
    proofs: list[Proof] = []
    call = training.caller(spec.deterministic and spec.engine.kind == "hf")
    alarms, version, missed = 0, 0, dict[str, int]()
    batch: list[float] = []
    seen: dict[str, list[float]] = {}
    try:
        for run in range(options.runs):
            with torch.no_grad():
                for name, tensor in start.items():
                    named[name].copy_(tensor)
            rng = random.Random(run)
            asked = questions(rng)
            stage = SftStage(steps=options.versions, lr=3e-4 if kind == "lora" else 2e-5, batch_size=len(asked))
            # As many answers are wrong as right: the weights move, and the model stays one that says sentences.
            rows = [
                record(
                    model.renderer,
                    [*each, {"role": "assistant", "content": f"The answer is {rng.randrange(200)}."}],
                    str(number),
                )
                for number, each in enumerate(asked)
            ]
            algorithm = training.sft_algorithm()
            trainer = training.trainer(stage, model, algorithm, version, run)
            make = training.batches(stage, model, algorithm)
            publisher = run_engines.publisher(joined, model, 300.0, call, proofs.append, prompts=asked)
            try:
                await publisher.publish(trainer)
                batch.append(await batch_gap(joined.engine, trainer, model, asked, call))
                for _ in range(options.versions):
                    await publisher.rest(trainer)
                    await call(trainer.step, make([[each] for each in rows], trainer.version))
                    await publisher.publish(trainer)
            except LogprobGap as error:
                alarms += 1
                print(f"{row}, run {run}: {error}", flush=True)
            if run < options.planted:
                for name, fault in faults(model.policy.module, start, kind).items():
                    trainer.version += 1
                    fresh = run_engines.publisher(joined, model, 300.0, call, prompts=asked)
                    try:
                        proof = await fresh.publish(cast("Any", Planted(trainer, fault)))
                    except LogprobGap as error:
                        seen.setdefault(name, []).append(float(str(error).split("differ by ")[1].split()[0]))
                    else:
                        seen.setdefault(name, []).append(proof.logprob_gap)
                        missed[name] = missed.get(name, 0) + 1
            version = trainer.version + 1
    finally:
        await joined.engine.close()
        joined.bridge.close()
    fresh_gap = max(proof.logprob_gap for proof in proofs if proof.canary_tokens >= SHORTEST)
    limits = [proof.gap_limit for proof in proofs]
    cells = [f"{statistics.fmean(seen[name]):.3g}{' MISSED' if name in missed else ''}" for name in seen]
    largest = max(proof.logprob_gap for proof in proofs)
    figures = [f"{fresh_gap:.2g}", f"{largest:.2g}", f"{min(limits):.2g}-{max(limits):.2g}", f"{max(batch):.2g}"]
    return [row, f"{alarms} of {options.runs}", f"{len(proofs)}", *figures, *cells], bool(alarms or missed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--versions", type=int, default=4, help="Training steps of a run.")
    parser.add_argument("--planted", type=int, default=1, help="After how many of the runs faults are planted.")
    parser.add_argument("--only", nargs="*", help="Rows, as bridge:type:full or bridge:type:lora.")
    options = parser.parse_args()
    note(f"canary of {options.model.name}, {options.device}, {options.runs} runs of {options.versions + 1} versions")
    rows, bad = list[list[str]](), False
    for row in options.only or (ON_CUDA if options.device == "cuda" else ON_CPU):
        with tempfile.TemporaryDirectory() as home:
            cells, failed = asyncio.run(one_row(row, options, Path(home)))
        rows.append(cells)
        bad |= failed
        print(" | ".join(cells), flush=True)
    print()
    table(
        ["row", "false", "proofs", "fresh", "largest", "limits", "batch", "stale", "shifted", "rope", "scale"], rows
    )  # fmt: skip
    sys.exit(int(bad))


if __name__ == "__main__":
    main()
