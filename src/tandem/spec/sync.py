"""`[sync]`: how a version reaches the engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import Spec


class _Sync(Spec):
    every: int = Field(default=1, ge=1)
    """Publish after every so many steps; at most train.max_lag + 1."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Both ends must have met by then, and the version been proven."""
    retries: int = Field(default=2, ge=0)
    """How often a partner that was lost is taken back, for one version."""


class InprocSync(_Sync):
    """Engine and trainer share one module; no byte moves."""

    bridge: Literal["inproc"] = "inproc"


class SharedSync(_Sync):
    """Single copy: the trainer's parameters are views of the engine's memory. CUDA IPC on one GPU, POSIX shared memory
    on a CPU."""

    bridge: Literal["shared"] = "shared"
    digest: bool = False
    """Both ends also read all weights back, each through its own mapping, and compare digests: for who doubts that one
    memory is one."""


class _Collective(_Sync):
    host: str = "127.0.0.1"
    """Where trainer and engines meet; an address of the trainer's machine that the engines reach."""
    backend: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """nccl: between GPUs. ipc: by memory that both map, of the one GPU or the one host that they are on. gloo: by way
    of the host. auto: NCCL if every engine has GPUs of its own, else ipc for adapters on one GPU, else gloo."""


class BroadcastSync(_Collective):
    """Full weights, in a few large flat buckets."""

    bridge: Literal["broadcast"] = "broadcast"
    bucket_mib: int = Field(default=256, ge=1)
    """Size of a bucket. Two are in memory at a time."""


class AdapterBroadcastSync(_Collective):
    """LoRA tensors in one flat transfer, straight to where the engine keeps adapters."""

    bridge: Literal["adapter_broadcast"] = "adapter_broadcast"


class AdapterSync(_Sync):
    """LoRA files in memory-backed storage, loaded over the engine's own interface under a new name each."""

    bridge: Literal["adapter"] = "adapter"
    directory: str = ""
    """Where they lie; left out, the machine's shared memory. Trainer and engine must both see it."""


class DiskSync(_Sync):
    """A whole checkpoint, which the engine loads in place."""

    bridge: Literal["disk"] = "disk"
    directory: str = ""
    """Where they lie; left out, inside the run. Trainer and engine must both see it."""


class RestartSync(_Sync):
    """A whole checkpoint, and the engine's process is started again from it: for any engine at all."""

    bridge: Literal["restart"] = "restart"
    directory: str = ""
    """Where they lie; left out, inside the run. Trainer and engine must both see it."""
    deadline_s: float = Field(default=600.0, gt=0)
    """The engine must serve it by then."""


SyncSpec = Annotated[
    InprocSync | SharedSync | BroadcastSync | AdapterSync | AdapterBroadcastSync | DiskSync | RestartSync,
    Field(discriminator="bridge"),
]
