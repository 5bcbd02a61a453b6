"""What several measurements share: a checkpoint of random weights, and an engine, for vLLM takes a minute to start."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.build import run_engines
from tandem.io.child_process import Child
from tandem.io.file_system import memory_backed
from tandem.ops.memory_meter import DeviceMemory
from tandem.recipes.random_checkpoints import SHAPES, random_checkpoint
from tandem.spec.engine import VllmEngineSpec


def ask_for_checkpoint(parser: argparse.ArgumentParser, shape: str = "qwen3-0.6b") -> None:
    """What `checkpoint_of` reads. `shape`: the one that is meant if none is named."""
    parser.add_argument("--shape", default=shape, choices=list(SHAPES))
    parser.add_argument("--checkpoint", type=Path, help="instead of a shape")
    parser.add_argument("--device", default="cuda")


def checkpoint_of(arguments: argparse.Namespace) -> Path:
    """`--checkpoint`, or one of `--shape`, made once a machine."""
    path = arguments.checkpoint or Path(tempfile.gettempdir()) / arguments.shape
    if not path.exists():
        random_checkpoint(arguments.shape, path, device=arguments.device)
        torch.cuda.empty_cache()  # does nothing where there is no GPU
    return path


def used_bytes() -> list[int]:
    """Of each GPU, by everybody."""
    pairs = [torch.cuda.mem_get_info(number) for number in range(torch.cuda.device_count())]
    return [total - free for free, total in pairs]


@dataclass
class Taken:
    before_gib: float
    peak_gib: float = 0.0


@contextmanager
def taken() -> Iterator[Taken]:
    """Of all GPUs, by everybody: before, and, once it has ended, the most meanwhile."""
    found = Taken(sum(used_bytes()) / 2**30)
    with DeviceMemory() if torch.cuda.is_available() else nullcontext() as memory:
        yield found
    found.peak_gib = found.before_gib + (memory.extra_bytes / 2**30 if memory else 0.0)


@contextmanager
def standing(
    engine: dict[str, Any], checkpoint: Path, home: Path, *, device: str, more: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """`engine`: a spec's [engine] for vLLM. Yields what a spec says of the one that stands. It may read versions from
    the directory that `home` is in."""
    spec = VllmEngineSpec.model_validate(engine)
    command = run_engines.engine_command(
        spec, device=device, dtype="bfloat16", thinking=False, directory=home, readable=[home.parent, memory_backed()]
    )
    started = time.perf_counter()
    child = Child(
        [*command(str(checkpoint), 0, home / "ready.json"), *more],
        ready_file=home / "ready.json",
        log=home / "engine.log",
        environment=dict(run_engines.gpu_environment(spec, 0, device)),
    )
    try:
        ready = child.wait_ready(spec.start_deadline_s)
        print(f"{checkpoint.name}: vLLM started in {time.perf_counter() - started:.0f} s", flush=True)
        yield {"kind": "vllm", "url": ready.url, "token_file": str(home / "token"), "max_context": spec.max_context}
    finally:
        child.stop()
