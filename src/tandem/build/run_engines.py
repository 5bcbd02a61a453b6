"""Build the engines of a training run, the weight bridge to them, and the publisher of versions.

Engines without a trainer are built in standalone_engines.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.build import standalone_engines
from tandem.build.canary_prompts import canary_prompts
from tandem.errors import SpecError
from tandem.io.gguf.directory import model_directory
from tandem.io.image_store import IMAGES
from tandem.protocols import Engine, WeightBridge
from tandem.publish import Call, Canary, Publisher
from tandem.spec.engine import HfEngineSpec, RemoteEngineSpec, ServerEngineSpec, VllmEngineSpec
from tandem.spec.model import ModelSpec, PathModel
from tandem.spec.precision import Float32Precision
from tandem.spec.run import RlSpec
from tandem.spec.sync import (
    AdapterBroadcastSync,
    AdapterSync,
    BroadcastSync,
    DiskSync,
    InprocSync,
    RestartSync,
    SharedSync,
    SyncSpec,
)
from tandem.types import Message, Proof

if TYPE_CHECKING:
    from tandem.build.built_model import BuiltModel
    from tandem.engine.server.child_process import OwnedProcess
    from tandem.train.crew import Crew
    from tandem.train.crew_bridge import BridgeOfRanks


# Fields of [engine] that are for the run, which owns the engine process, and not for the process itself.
_OWNER_FIELDS = ("url", "token_file", "max_restarts", "replicas", "gpus", "deadline_s")


@dataclass(frozen=True)
class Joined:
    """An engine and the bridge to it. `retries`: how often a sync is retried after one of its ends was lost."""

    engine: Engine
    bridge: WeightBridge
    retries: int
    bare: bool = False
    """The engine has no prefix cache and no CUDA graphs that could still hold older weights."""


def join(
    spec: RlSpec,
    model: BuiltModel,
    home: Path,
    *,
    unchecked: bool = False,
    crew: Crew | None = None,
    begun: BegunEngines | None = None,
) -> Joined:
    """Build the engine and the bridge of a run. `home`: directory for engine logs and files, and for versions that are
    sent as files. `unchecked`: accept a vLLM version that has not passed the conformance suite. `crew`: rank 0's, where
    several ranks train. `begun`: engine processes that were begun before the model was built."""
    if isinstance(spec.engine, HfEngineSpec):
        engine = standalone_engines.embedded(spec.engine, model, inline=spec.deterministic)
        return Joined(engine, bridge(spec, model, home, Path()), 0, bare=True)  # one process: no retry is possible
    _check_served(spec, model)
    start = Path()
    if not isinstance(spec.engine, RemoteEngineSpec):
        start = starting_model(spec, model, home)
    engine = outside(spec, model, home, unchecked=unchecked, begun=begun)
    bare = isinstance(spec.engine, ServerEngineSpec)
    return Joined(engine, bridge(spec, model, home, start, crew), spec.sync.retries, bare)


def _check_served(spec: RlSpec, model: BuiltModel) -> None:
    """Raise SpecError for a model or adapters that engines in other processes refuse."""
    if isinstance(spec.engine, ServerEngineSpec):  # its process runs the embedded engine
        from tandem.ops.attention_masks import check_attention

        check_attention(model.policy.module.config)
    if spec.model.lora is not None:
        from tandem.model.lora import check_only_linear

        check_only_linear(model.policy.module, spec.model.lora)


def targets_beside_experts(model: BuiltModel) -> list[str]:
    """Return the targets of model.lora on the attention alone, where an adapter is on stacked experts, which engines in
    other processes refuse; otherwise none."""
    from tandem.model.lora import beside_experts

    odd, linear = beside_experts(model.policy.module)
    return linear if odd else []


# --- engines


@dataclass(frozen=True)
class BegunEngines:
    """The engine processes of a run, begun before its model was built."""

    processes: Sequence[OwnedProcess] = ()
    why_imports_only: str = ""
    """Why they do not load their model yet; empty if they do."""


@contextmanager
def begun(spec: RlSpec, home: Path) -> Iterator[BegunEngines]:
    """Begin the engine processes of a run while the trainer loads its model; end them with the context. On the
    trainer's GPU they only import what they need: how much memory is free there is known once the trainer is built."""
    engine = spec.engine
    if isinstance(engine, HfEngineSpec | RemoteEngineSpec) or engine.url:
        yield BegunEngines()
        return
    from tandem.build.built_model import pick_device

    device = pick_device(spec.device).type
    why = "the trainer is on its GPU" if on_trainers_gpu(spec, device) else ""
    if untouched_directory(spec.model) is None:
        why = "the run writes the model for it"
    processes = [_process(spec, number, device, home) for number in range(engine.replicas)]
    try:
        for each in processes:
            each.begin(loads=not why)
        yield BegunEngines(processes, why and f"it only imports meanwhile: {why}")
    finally:
        for each in processes:
            each.end()


def outside(
    spec: RlSpec, model: BuiltModel, home: Path, *, unchecked: bool = False, begun: BegunEngines | None = None
) -> Engine:
    """Build engines in other processes, behind a pool. A single engine also gets a pool, which waits if it is lost."""
    import torch

    from tandem.engine.pool import EnginePool
    from tandem.engine.server.engine import ExistingServer, ServerEngine

    if isinstance(spec.engine, RemoteEngineSpec):
        from tandem.engine.remote.engine import RemoteEngine

        asked = spec.engine
        options: dict[str, Any] = {
            "end_ids": model.renderer.end_ids, "key_env": asked.key_env, "on_update": asked.on_update,
            "deadline_s": asked.deadline_s, "slots": spec.train.max_lag + 2,
        }  # fmt: skip
        return EnginePool([RemoteEngine(url, asked.model, **options) for url in asked.urls])
    engine, device = spec.engine, model.device.type
    assert not isinstance(engine, HfEngineSpec)
    places: Sequence[OwnedProcess | ExistingServer] = begun.processes if begun else ()
    if engine.url:
        places = [ExistingServer(engine.url, Path(engine.token_file))]
    elif begun is None:
        places = [_process(spec, number, device, home, unchecked) for number in range(engine.replicas)]
    return EnginePool(
        [
            ServerEngine(
                place,
                receivers=getattr(engine, "tensor_parallel", 1),
                deadline_s=spec.sync.deadline_s,
                shares_memory=spec.sync.traits.shares_memory,
                shares_device=sleeps(spec, device),
                make_room=torch.cuda.empty_cache,  # does nothing without a GPU
            )
            for place in places
        ]
    )


def _process(spec: RlSpec, number: int, device: str, homes: Path, unchecked: bool = False) -> OwnedProcess:
    """Build the process of one engine server, without starting it. `number`: which replica. `device`: the trainer's."""
    from tandem.engine.server.child_process import Owned, OwnedProcess

    engine, home = spec.engine, homes / f"engine-{number}"
    assert isinstance(engine, ServerEngineSpec | VllmEngineSpec)
    return OwnedProcess(
        Owned(
            _command_of(spec, engine, device, home, unchecked),
            model=str(starting_directory(spec.model, homes)),
            directory=home,
            environment=gpu_environment(engine, number, device),
            start_deadline_s=engine.start_deadline_s,
            max_restarts=engine.max_restarts,
            ahead=spec.sync.traits.restarts_engine,
        )
    )


def sleeps(spec: RlSpec, device: str) -> bool:
    """Return whether the engine frees its GPU memory while the trainer steps. `device`: the trainer's."""
    engine = spec.engine
    if not isinstance(engine, VllmEngineSpec) or engine.sleep != "auto":
        return isinstance(engine, VllmEngineSpec) and engine.sleep == "free"
    return on_trainers_gpu(spec, device) and not spec.sync.traits.shares_memory and spec.train.max_lag == 0


def on_trainers_gpu(spec: RlSpec, device: str) -> bool:
    """Return whether an engine that the run starts is on a GPU of the trainer's ranks."""
    if device != "cuda" or not isinstance(spec.engine, VllmEngineSpec):
        return device == "cuda" and isinstance(spec.engine, ServerEngineSpec)
    return any(map(spec.engine.engines_on, range(spec.parallel.row_shards)))


def _command_of(
    spec: RlSpec, engine: ServerEngineSpec | VllmEngineSpec, device: str, home: Path, unchecked: bool
) -> Callable[[str, int, Path], list[str]]:
    command = engine_command(
        engine.model_copy(update={"sleep": "free"} if sleeps(spec, device) else {}),
        device=device,
        dtype="float32" if isinstance(spec.precision, Float32Precision) else "bfloat16",
        thinking=spec.model.thinking,
        directory=home,
        readable=_readable(spec, home),
    )
    more = [*(["--unchecked"] if unchecked and isinstance(engine, VllmEngineSpec) else []), *adapter_options(spec)]
    if isinstance(engine, VllmEngineSpec):
        more += ["--images", str(home.parents[1] / IMAGES)]  # of the run; a model of text makes nothing of it
    return lambda *which: [*command(*which), *more]


def adapter_options(spec: RlSpec) -> list[str]:
    """Return the options that tell vLLM how many adapters, and of which rank, the trainer will send."""
    if not isinstance(spec.engine, VllmEngineSpec) or spec.model.lora is None:
        return []
    return ["--adapter-slots", str(spec.train.max_lag + 2), "--max-rank", str(spec.model.lora.rank)]


def engine_command(
    spec: ServerEngineSpec | VllmEngineSpec,
    *,
    device: str,
    dtype: str,
    thinking: bool,
    directory: Path,
    readable: Sequence[Path],
) -> Callable[[str, int, Path], list[str]]:
    """Return a function that makes the command line of `tandem engine serve` from a model directory, its version and a
    ready file. `directory`: for the token. `readable`: directories that versions are read from, if sent as files."""
    options = {"kind": spec.kind, "data-dir": directory, "port": 0, "device": device, "dtype": dtype}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    for name, value in spec.model_dump(exclude={"kind", *_OWNER_FIELDS}, exclude_defaults=True).items():
        words += ["--set", f"{name}={json.dumps(value, ensure_ascii=False)}"]
    words += ["--thinking" if thinking else "--no-thinking"]
    words += [str(word) for path in readable for word in ("--allow-dir", path)]
    program = [sys.executable, "-m", "tandem", "engine", "serve"]

    def command(model: str, version: int, ready_file: Path) -> list[str]:
        return [*program, model, "--version", str(version), "--ready-file", str(ready_file), *words]

    return command


def _readable(spec: RlSpec, home: Path) -> list[Path]:
    """Return the directories that the engine reads versions from, if they are sent as files."""
    if isinstance(spec.sync, AdapterSync):
        return adapter_places(spec.sync)
    if isinstance(spec.sync, DiskSync | RestartSync):
        return [_versions(spec.sync, home.parent)]
    return []


def version_places(sync: SyncSpec, default: Path) -> list[Path]:
    """Return the directories that an engine reads versions from; none if they do not come as files. `default`: for
    whole checkpoints, where the spec names no directory."""
    if isinstance(sync, AdapterSync):
        return adapter_places(sync)
    if isinstance(sync, DiskSync | RestartSync):
        return [Path(sync.directory or default).absolute()]
    return []


def adapter_places(sync: AdapterSync) -> list[Path]:
    """Return the directories that the engine reads adapters from."""
    from tandem.io.file_system import memory_backed

    return [Path(sync.directory).resolve() if sync.directory else memory_backed()]


def gpu_environment(engine: ServerEngineSpec | VllmEngineSpec, replica: int, device: str) -> Mapping[str, str]:
    """Return the environment variables that give one replica its GPUs."""
    if not isinstance(engine, VllmEngineSpec):
        return {}
    shared = engine.replicas > 1 and len(engine.gpus) <= engine.tensor_parallel
    if shared and device == "cuda" and engine.replicas * engine.memory_share > 1:
        raise SpecError(
            f"engine.replicas = {engine.replicas}: on one GPU each would take memory_share = {engine.memory_share:g}; "
            "give each its own with engine.gpus, or a share that fits"
        )
    if not (gpus := engine.gpus_of(replica)):
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = visible.split(",") if visible else [str(n) for n in range(max(gpus) + 1)]
    if max(gpus) >= len(numbers):
        raise SpecError(
            f"engine.gpus = {list(engine.gpus)}: CUDA_VISIBLE_DEVICES = '{visible}' has only {len(numbers)} GPUs; use "
            f"numbers below {len(numbers)}"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(numbers[n] for n in gpus)}


def untouched_directory(model: ModelSpec) -> Path | None:
    """Return the directory whose weights the model begins with, unchanged; None if there is none."""
    if not isinstance(model, PathModel) or model.warm_start is not None:
        return None
    directory = Path(model_directory(model.path))
    return directory.resolve() if directory.is_dir() else None


def starting_model(spec: RlSpec, model: BuiltModel, home: Path) -> Path:
    """Return the directory that an engine process loads before the first version arrives: same model and tokenizer."""
    path = starting_directory(spec.model, home)
    if not path.exists():
        from tandem.build.training import export

        path.parent.mkdir(parents=True, exist_ok=True)
        export(model, path)
    return path


def starting_directory(model: ModelSpec, home: Path) -> Path:
    return untouched_directory(model) or (home / "model").resolve()


# --- bridges


def bridge(spec: RlSpec, model: BuiltModel, home: Path, start: Path, crew: Crew | None = None) -> WeightBridge:
    """Build the weight bridge that `[sync]` names. `start`: the directory that engine processes have loaded. `crew`:
    rank 0's, where several ranks train."""
    sync = spec.sync
    if getattr(sync, "backend", "") == "nccl" and model.device.type == "cpu":
        raise SpecError("sync.backend = 'nccl': the trainer is on a CPU; choose 'gloo' or 'ipc', or leave it out")
    match sync:
        case InprocSync():
            return inproc_bridge(sync.deadline_s)
        case SharedSync():
            from tandem.bridge.shared.sender import SharedBridge

            shared = SharedBridge(sync.deadline_s, digest=sync.digest, ranks=spec.parallel.ranks)
            if crew is None:
                return shared
            from tandem.train.crew_memory import CrewMemory

            return CrewMemory(crew, shared)
        case BroadcastSync():
            from tandem.bridge.collective.sender import BroadcastBridge

            broadcast = BroadcastBridge(
                model.device,
                host=sync.host,
                bucket_bytes=sync.bucket_mib * 2**20,
                deadline_s=sync.deadline_s,
                backend=sync.backend,
                ranks=spec.parallel.ranks,
                row_shards=spec.parallel.row_shards,
            )
            return _of_ranks(crew, broadcast)
        case AdapterBroadcastSync():
            from tandem.bridge.collective.sender import AdapterBroadcastBridge

            return AdapterBroadcastBridge(
                model.device, host=sync.host, deadline_s=sync.deadline_s, backend=sync.backend
            )
        case AdapterSync():
            from tandem.bridge.files.adapter import AdapterBridge

            return AdapterBridge(Path(sync.directory) if sync.directory else None, deadline_s=sync.deadline_s)
        case DiskSync():
            from tandem.bridge.files.checkpoint import DiskBridge

            return _of_ranks(crew, DiskBridge(_versions(sync, home), start, **_checkpoints(spec, model, crew)))
        case RestartSync():
            from tandem.bridge.files.checkpoint import RestartBridge

            return _of_ranks(crew, RestartBridge(_versions(sync, home), start, **_checkpoints(spec, model, crew)))


def _of_ranks(crew: Crew | None, bridge: BridgeOfRanks) -> WeightBridge:
    """Return the bridge, or one that has every rank send its rows."""
    if crew is None:
        return bridge
    from tandem.train.crew_bridge import CrewBridge

    return CrewBridge(crew, bridge)


def _checkpoints(spec: RlSpec, model: BuiltModel, crew: Crew | None) -> dict[str, Any]:
    found: dict[str, Any] = {"buffers": _buffers(model), "deadline_s": spec.sync.deadline_s}
    if crew is not None:
        from tandem.build.crew import rank_files

        found["rank_files"] = rank_files(crew, spec)
    return found


def inproc_bridge(deadline_s: float = 60.0) -> WeightBridge:
    """Build the bridge of an engine that shares the trainer's module."""
    from tandem.bridge.inproc import InprocBridge

    return InprocBridge(deadline_s)


def _versions(sync: DiskSync | RestartSync, home: Path) -> Path:
    path = Path(sync.directory).resolve() if sync.directory else (home / "versions").resolve()
    path.mkdir(parents=True, exist_ok=True)
    return path


def _buffers(model: BuiltModel) -> list[str]:
    """Return the names of buffers that engines serve but checkpoints lack: rotary tables."""
    # Not by state_dict(): where several ranks train, it drops what this rank has gathered, and the others keep theirs.
    modules: Any = model.policy.module.named_modules()
    return [f"{path}.{name}" if path else name for path, part in modules for name in part._non_persistent_buffers_set]


# --- publishing


def publisher(
    joined: Joined,
    model: BuiltModel,
    deadline_s: float,
    call: Call,
    on_proof: Callable[[Proof], None] = lambda proof: None,
    on_attached: Callable[[Mapping[str, Any]], None] = lambda attachment: None,
    prompts: Sequence[Sequence[Message]] = (),
) -> Publisher:
    """Build the publisher of a run. It calls `on_proof` after each sync and `on_attached` after each attach. `prompts`:
    the run's own, which the canary asks first."""
    return Publisher(
        joined.bridge,
        joined.engine,
        deadline_s=deadline_s,
        retries=joined.retries,
        canary=canary(model, bare=joined.bare, prompts=prompts),
        call=call,
        on_proof=on_proof,
        on_attached=on_attached,
    )


def canary(model: BuiltModel, *, bare: bool = False, prompts: Sequence[Sequence[Message]] = ()) -> Canary:
    """Return the canary of a model: the run's own prompts and built-in ones, and the limits of the logprob gap.

    33 tokens fill two blocks of a prefix cache, and the second answer token goes through CUDA graphs; a `bare` engine
    has neither, so its prompt may be shorter, and one token is enough. The limits are wider in 16 bits, where logprobs
    are sometimes off by some hundredths.
    """
    import torch

    shortest, max_tokens, doubted = (1, 1, 4) if bare else (33, 2, 8)
    first, *more = canary_prompts(model.renderer, prompts, shortest=shortest, longest=model.context - doubted)
    exact = next(model.policy.module.parameters()).dtype == torch.float32
    floor, ceiling = (1e-4, 1e-2) if exact else (0.05, 0.1)
    most = model.context - len(first)
    return Canary(first, floor, ceiling, min(max_tokens, most), min(doubted, most), more_prompts=tuple(more))


def no_publisher(call: Call) -> Publisher:
    """Build a publisher that does nothing, for stages that train on recorded data."""
    from tandem.bridge.null import NullBridge
    from tandem.engine.null import NullEngine

    return Publisher(NullBridge(), NullEngine(), call=call)
