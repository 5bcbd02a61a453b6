"""Check that the bridge, the engine, the model and the precision of a spec work together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tandem.spec.bridges import ADAPTER_BROADCAST, BROADCAST, INPROC, SHARED, BridgeTraits
from tandem.spec.engine import EngineSpec, HfEngineSpec, RemoteEngineSpec, VllmEngineSpec
from tandem.spec.model import ModelSpec
from tandem.spec.parallel import ParallelSpec
from tandem.spec.precision import Bfloat16Precision, PrecisionSpec
from tandem.spec.sync import SyncSpec
from tandem.spec.train import Stage

VLLM_RANK = 512
_COUNTS = ("replicas", "tensor_parallel")
_BY_NUMBERS = ("adamw", "adamw_8bit", "adamw_offload")
"""Optimizers that update each number, or each block of a row, by itself."""


def usual_bridge(tables: Mapping[str, Any]) -> BridgeTraits:
    """Return the bridge of a spec that names none: the fastest one to its engine. An engine that was started outside of
    the run gets none (inproc, which is then refused), because where it runs is unknown."""

    def table(name: str) -> Mapping[str, Any]:
        found = tables.get(name)
        return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}

    engine = table("engine")
    if engine.get("kind") not in ("server", "vllm") or engine.get("url"):
        return INPROC
    if "lora" in table("model"):
        return ADAPTER_BROADCAST
    apart = engine.get("gpus", (0,)) not in ([], [0], (), (0,)) or table("rollouts").get("kind") == "atropos"
    several = table("parallel").get("ranks", 1) != 1 or any(engine.get(name, 1) != 1 for name in _COUNTS)
    released = any(table(stage).get("gradient_release") for stage in ("train", "warmup"))
    return BROADCAST if apart or several or released or table("precision").get("master") == "none" else SHARED


def check_sync(
    sync: SyncSpec,
    engine: EngineSpec,
    model: ModelSpec,
    precision: PrecisionSpec,
    stages: Mapping[str, Stage],
    ranks: int = 1,
) -> None:
    """Raise ValueError for a combination that cannot work, before anything is loaded."""
    _check_reach(sync, engine)
    if sync.every > 1 and sync.traits.single_copy:
        raise ValueError(
            f"sync.every = {sync.every}: bridge = '{sync.bridge}' has one copy of the weights, so every step "
            "reaches the engine at once; leave sync.every out"
        )
    if sync.traits.carries == "adapter" and model.lora is None:
        raise ValueError(
            f"sync.bridge = '{sync.bridge}': there are no adapters to send; add [model.lora], or choose 'broadcast' or "
            "'disk'"
        )
    if sync.traits.shares_memory:
        _check_shared_memory(engine, model, precision, stages, ranks)
    if isinstance(engine, VllmEngineSpec) and engine.gpus:
        each, together = engine.tensor_parallel, engine.tensor_parallel * engine.replicas
        if len(engine.gpus) not in (each, together) or len(set(engine.gpus)) < len(engine.gpus):
            raise ValueError(
                f"engine.gpus = {list(engine.gpus)}: tensor_parallel = {each} and replicas = {engine.replicas} need "
                f"{together} different GPUs, or {each} that all replicas share"
            )
    if isinstance(engine, VllmEngineSpec) and model.lora is not None and model.lora.rank > VLLM_RANK:
        raise ValueError(
            f"model.lora.rank = {model.lora.rank}: vLLM serves adapters of rank {VLLM_RANK} at most; choose less, or "
            "engine.kind = 'server'"
        )


def _check_reach(sync: SyncSpec, engine: EngineSpec) -> None:
    if ("hf" in sync.traits.engines) != (engine.kind == "hf"):
        if engine.kind == "hf":
            raise ValueError(
                f"sync.bridge = '{sync.bridge}': is for engines in processes of their own, and engine.kind = 'hf' (the "
                "default) runs inside the trainer; add engine.kind = 'server' or 'vllm', or leave sync.bridge out"
            )
        choices = (
            "'adapter', with [model.lora]"
            if isinstance(engine, RemoteEngineSpec)
            else (
                "'shared' (one copy, on one GPU), 'broadcast' (between GPUs), 'disk' (anywhere), or with [model.lora] "
                "'adapter_broadcast'"
            )
        )
        raise ValueError(
            f"engine.kind = '{engine.kind}': runs in a process of its own, which sync.bridge = 'inproc' (the default) "
            f"does not reach; add sync.bridge = {choices}"
        )
    if isinstance(engine, RemoteEngineSpec):
        if engine.kind not in sync.traits.engines:
            raise ValueError(
                f"sync.bridge = '{sync.bridge}': a remote server (engine.kind = 'remote') can only load adapters from "
                "files; choose 'adapter'"
            )
        return
    if isinstance(engine, HfEngineSpec):
        return
    if engine.url and not engine.token_file:
        raise ValueError(f"engine.url = '{engine.url}': needs a token; set engine.token_file to its file")
    if engine.url and engine.replicas > 1:
        raise ValueError(f"engine.replicas = {engine.replicas}: engine.url names one engine; leave one of them out")
    if sync.traits.restarts_engine and engine.url:
        raise ValueError(
            f"sync.bridge = 'restart': engine.url = '{engine.url}' was started outside this run, which may not "
            "end it; leave url out, or choose 'disk'"
        )
    if sync.traits.shares_memory and engine.replicas > 1:
        raise ValueError(
            f"engine.replicas = {engine.replicas}: bridge = 'shared' is one copy of the weights, in one engine; choose "
            "'broadcast', or one replica"
        )


def check_shared_ranks(parallel: ParallelSpec, engine: EngineSpec, stages: Mapping[str, Stage]) -> None:
    """Raise ValueError for what does not go with several ranks that train in the memory of vLLM's workers."""
    if not isinstance(engine, VllmEngineSpec):
        raise ValueError(
            f"sync.bridge = 'shared': with parallel.ranks = {parallel.ranks} each rank trains in the memory of one of "
            f"vLLM's workers, and engine.kind = '{engine.kind}' is one process; choose engine.kind = 'vllm', or the "
            "bridge 'broadcast'"
        )
    if parallel.hosts > 1:
        raise ValueError(
            f"parallel.hosts = {parallel.hosts}: under sync.bridge = 'shared' all ranks are on the engine's host; "
            "choose 'broadcast'"
        )
    for name, stage in stages.items():
        if stage.optimizer.kind not in _BY_NUMBERS:
            raise ValueError(
                f"{name}.optimizer.kind = '{stage.optimizer.kind}': under sync.bridge = 'shared' with parallel.ranks = "
                f"{parallel.ranks} a rank holds columns of some matrices, and this optimizer needs rows or all of "
                f"them; choose one of {', '.join(_BY_NUMBERS)}, or the bridge 'broadcast'"
            )


def _check_shared_memory(
    engine: EngineSpec, model: ModelSpec, precision: PrecisionSpec, stages: Mapping[str, Stage], ranks: int
) -> None:
    if isinstance(engine, VllmEngineSpec):
        if engine.sleep == "free":
            raise ValueError(
                "engine.sleep = 'free': under sync.bridge = 'shared' the trainer uses the engine's weights, so their "
                "memory cannot be freed; leave sleep out, or choose another bridge"
            )
        if engine.tensor_parallel != ranks:
            raise ValueError(
                f"engine.tensor_parallel = {engine.tensor_parallel}: under sync.bridge = 'shared' each rank of the "
                f"trainer trains in the memory of one of vLLM's workers, and parallel.ranks = {ranks}; make them "
                "equal, or choose 'broadcast'"
            )
        if engine.gpus not in ((), tuple(range(ranks))):
            raise ValueError(
                f"engine.gpus = {list(engine.gpus)}: under sync.bridge = 'shared' the one copy of the weights lies on "
                f"the trainer's GPUs, which are numbers 0 to {ranks - 1}; leave gpus out, or choose 'broadcast'"
            )
    if model.lora is not None:
        raise ValueError(
            "sync.bridge = 'shared': with [model.lora] there is no single copy of weights and adapters; choose "
            "'adapter' or 'adapter_broadcast'"
        )
    if isinstance(precision, Bfloat16Precision) and precision.master == "none":
        raise ValueError(
            "sync.bridge = 'shared': with precision.master = 'none' most updates would round to nothing in the "
            "engine's memory; choose 'split' or 'stochastic'"
        )
    for name, stage in stages.items():
        if stage.gradient_release:
            raise ValueError(
                f"{name}.gradient_release = true: bridge = 'shared' has one copy of the weights, so a failed step "
                "would already have changed weights that are served; leave one of them out"
            )
