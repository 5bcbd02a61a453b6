"""An engine that several measurements share: vLLM takes a minute to start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.bridge.adapter.trainer import memory_backed
from tandem.io.child import Child
from tandem.recipes import build_engine
from tandem.spec.engine import VllmEngineSpec


@contextmanager
def standing(
    engine: dict[str, Any],
    checkpoint: Path,
    home: Path,
    *,
    device: str = "cuda",
    dtype: str = "bfloat16",
    more: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """`engine`: a spec's [engine] for vLLM. Yields what a spec says of the one that stands. It may read versions from
    the directory that `home` is in."""
    spec = VllmEngineSpec.model_validate(engine)
    command = build_engine.engine_command(
        spec, device=device, dtype=dtype, thinking=False, directory=home, readable=[home.parent, memory_backed()]
    )
    gpus = spec.gpus_of(0)
    child = Child(
        [*command(str(checkpoint), 0, home / "ready.json"), *more],
        ready_file=home / "ready.json",
        log=home / "engine.log",
        environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {},
    )
    try:
        ready = child.wait_ready(spec.start_deadline_s)
        yield {"kind": "vllm", "url": ready.url, "token_file": str(home / "token"), "max_context": spec.max_context}
    finally:
        child.stop()
