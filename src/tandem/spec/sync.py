"""`[sync]`: how a version reaches the engine."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tandem.spec import bridges
from tandem.spec.base import Spec


class _Sync(Spec):
    traits: ClassVar[bridges.BridgeTraits]
    """What this bridge carries, reaches and needs."""

    every: int = Field(default=1, ge=1)
    """Publish after every so many steps; at most train.max_lag + 1."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Seconds within which both ends must connect and the weights arrive; each prompt that proves them has as many."""
    retries: int = Field(default=2, ge=0)
    """How often a lost engine may be attached again while one version is published."""

    def staged_bytes(self, moved: int) -> int:
        """Return the GPU memory that a version of `moved` bytes takes during its transfer, beside the served one."""
        return moved if self.traits.carries == "adapter" else 0


class InprocSync(_Sync):
    """Engine and trainer share one module; no byte moves."""

    traits = bridges.INPROC
    bridge: Literal["inproc"] = "inproc"


class SharedSync(_Sync):
    """Single copy: the trainer's parameters are views of the engine's memory. CUDA IPC on one GPU, POSIX shared memory
    on a CPU."""

    traits = bridges.SHARED
    bridge: Literal["shared"] = "shared"
    digest: bool = False
    """Both ends also read all weights back, each through its own mapping, and compare digests: a check that both really
    map one memory."""


class _Collective(_Sync):
    host: str = "127.0.0.1"
    """The address that the trainer listens on; engines must reach it."""
    backend: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """nccl: between GPUs. ipc: through memory that both map, on one GPU or one host. gloo: through the host. auto: nccl
    if every engine has GPUs of its own, else ipc for adapters on one GPU, else gloo."""


class BroadcastSync(_Collective):
    """Full weights, in a few large flat buckets."""

    traits = bridges.BROADCAST
    bridge: Literal["broadcast"] = "broadcast"
    bucket_mib: int = Field(default=256, ge=1)
    """Size of a bucket. Two are in memory at a time."""

    def staged_bytes(self, moved: int) -> int:
        return 2 * self.bucket_mib * 2**20


class AdapterBroadcastSync(_Collective):
    """LoRA tensors in one flat transfer, straight into the memory where the engine keeps adapters."""

    traits = bridges.ADAPTER_BROADCAST
    bridge: Literal["adapter_broadcast"] = "adapter_broadcast"


class AdapterSync(_Sync):
    """LoRA files in memory-backed storage, which the engine's own API loads under a new name for each version."""

    traits = bridges.ADAPTER
    bridge: Literal["adapter"] = "adapter"
    directory: str = ""
    """Directory of the files; left out: the machine's shared memory. Trainer and engine must both see it."""


class DiskSync(_Sync):
    """A whole checkpoint, which the engine loads in place."""

    traits = bridges.DISK
    bridge: Literal["disk"] = "disk"
    directory: str = ""
    """Directory of the checkpoints; left out: inside the run. Trainer and engine must both see it."""


class RestartSync(_Sync):
    """A whole checkpoint, from which the engine's process is restarted; works with any engine."""

    traits = bridges.RESTART
    bridge: Literal["restart"] = "restart"
    directory: str = ""
    """Directory of the checkpoints; left out: inside the run. Trainer and engine must both see it."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Seconds within which the engine must serve the version."""


SyncSpec = Annotated[
    InprocSync | SharedSync | BroadcastSync | AdapterSync | AdapterBroadcastSync | DiskSync | RestartSync,
    Field(discriminator="bridge"),
]

DEFAULT_SYNC = InprocSync()
