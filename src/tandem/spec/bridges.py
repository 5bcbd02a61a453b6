"""What each bridge carries, which engines it reaches, what it needs and what it costs.

The other parts ask these traits instead of comparing names. This module also runs inside vLLM's processes: it needs
the standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.types import WeightKind


@dataclass(frozen=True, slots=True)
class BridgeTraits:
    name: str
    summary: str
    """What moves, in one line; `tandem plan` prints it."""
    carries: WeightKind
    """live: nothing moves, there is one copy of the weights. adapter: needs [model.lora]."""
    engines: tuple[Literal["hf", "server", "vllm", "remote"], ...]
    """The kinds of engine that it reaches."""
    engine_end: Literal["module", "memory", "group", "files"]
    """What receives versions in the engine's process. module: the trainer's own module. memory: the engine's tensors,
    which the trainer maps. group: buckets over a process group. files: a directory."""
    restarts_engine: bool = False
    """Whether each version restarts the engine's process."""
    separate_gpus: bool = False
    """Whether trainer and engine need different GPUs, if they use GPUs."""

    @property
    def single_copy(self) -> bool:
        """Whether an optimizer step changes the weights that the engine serves."""
        return self.carries == "live"

    @property
    def in_process(self) -> bool:
        """Whether the engine is embedded in the trainer's process."""
        return self.engine_end == "module"

    @property
    def shares_memory(self) -> bool:
        """Whether the trainer trains in the engine's memory: of one process, or each rank in that of the worker on its
        GPU. Such an engine may not free its memory while it sleeps, 16-bit weights need a master copy, and no gradient
        may be applied before the whole step is known to be good."""
        return self.engine_end == "memory"


INPROC = BridgeTraits("inproc", "engine and trainer share one module; nothing moves", "live", ("hf",), "module")
SHARED = BridgeTraits(
    "shared", "one copy of the weights, in the engine's memory; nothing moves", "live", ("server", "vllm"), "memory"
)
BROADCAST = BridgeTraits(
    "broadcast",
    "full weights between GPUs, in a few flat buckets",
    "full",
    ("server", "vllm"),
    "group",
    separate_gpus=True,
)
ADAPTER = BridgeTraits(
    "adapter", "adapters only, as files that any engine can load", "adapter", ("server", "vllm", "remote"), "files"
)
ADAPTER_BROADCAST = BridgeTraits(
    "adapter_broadcast",
    "adapters only, straight into the engine's adapter memory",
    "adapter",
    ("server", "vllm"),
    "group",
)
DISK = BridgeTraits("disk", "whole checkpoints, as files that both can read", "full", ("server", "vllm"), "files")
RESTART = BridgeTraits(
    "restart",
    "a whole checkpoint, then an engine restart: for any engine, and slow",
    "full",
    ("server", "vllm"),
    "files",
    restarts_engine=True,
)

BRIDGES: Mapping[str, BridgeTraits] = {
    each.name: each for each in (INPROC, SHARED, BROADCAST, ADAPTER, ADAPTER_BROADCAST, DISK, RESTART)
}


def on_one_gpu(*, adapters: bool) -> BridgeTraits:
    """Return the fastest bridge to a vLLM on the trainer's GPU."""
    return ADAPTER_BROADCAST if adapters else SHARED


def traits_of(link: Mapping[str, Any]) -> BridgeTraits | None:
    """Return the traits of the bridge that made `link`; None for a link of no known bridge."""
    mode = link.get("mode")
    return BRIDGES.get(mode) if isinstance(mode, str) else None
