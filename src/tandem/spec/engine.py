"""`[engine]`: who samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import LocalPath, Spec
from tandem.types import OnUpdate


class _EngineSpecBase(Spec):
    deadline_s: float = Field(default=60.0, gt=0)
    """An engine that makes no token for anybody for so long is silent, and ends the run."""


class _Batching(_EngineSpecBase):
    max_running: int = Field(default=256, ge=1, le=4096)
    """Most sequences decoded together."""
    max_context: int = Field(default=0, ge=0)
    """Longest prompt plus completion; 0 takes what the model was made for."""
    replicas: int = Field(default=1, ge=1, le=8)
    """Several engines behind one pool."""


class HfEngineSpec(_Batching):
    """The embedded engine: in this process, on the trainer's own module. Replicas share the module: they rehearse a
    set-up, and are no faster."""

    kind: Literal["hf"] = "hf"
    kv_gib: float = Field(default=4.0, gt=0)
    """Memory for keys and values; requests that do not fit yet wait."""


class _Process(_Batching):
    url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL of a running engine, as started by `tandem engine serve`. Left out: the run starts its own."""
    token_file: Annotated[str, LocalPath()] = ""
    """With url: the file that holds its token."""
    start_deadline_s: float = Field(default=300.0, gt=0)
    """It must be ready by then."""
    max_restarts: int = Field(default=3, ge=0)
    """How often a run's own engine is started again after it died."""


class ServerEngineSpec(_Process):
    """The embedded engine as a process of its own."""

    kind: Literal["server"] = "server"
    kv_gib: float = Field(default=4.0, gt=0)
    """Memory for keys and values; requests that do not fit yet wait."""
    on_update: OnUpdate = "continue"
    """What happens to requests in flight when a version arrives. continue: they continue under it, with keys and values
    recomputed. finish: they end under the old version first. restart: they are sampled again from their prompt."""


class VllmEngineSpec(_Process):
    """vLLM in a process and a Python environment of its own."""

    kind: Literal["vllm"] = "vllm"
    python: Annotated[str, LocalPath()] = ""
    """The interpreter of its environment, as `tandem engine install vllm` makes one. Left out: where that puts it."""
    tensor_parallel: int = Field(default=1, ge=1, le=8)
    """GPUs that hold one copy of the model together."""
    memory_share: float = Field(default=0.9, gt=0, lt=1)
    """Of each GPU's memory, weights included. It must be free when the engine starts and whenever it wakes."""
    sleep: Literal["auto", "free", "keep"] = "auto"
    """Its GPU memory while the trainer steps. free: keys and values are dropped and weights moved to the host, so that
    the trainer has the room; nothing is sampled meanwhile. keep: it stays the engine's. auto: free where both are on
    one GPU and train.max_lag = 0, so that nothing would be sampled anyway."""
    eager: bool = False
    """Without CUDA graphs: starts sooner, decodes slower."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    """Which ones, of those that the run itself sees; left out, all of them. For several replicas `tensor_parallel` of
    them, which they share, or so many for each, one replica's behind the other's."""
    on_update: Literal["auto", OnUpdate] = "auto"
    """What happens to requests in flight when a version arrives. continue: they continue under it, with keys and values
    recomputed; with adapters they end under the one that they began with. finish: they end under the old version
    first. restart: they are sampled again from their prompt. auto: continue requests where the engine supports it;
    otherwise wait for them to finish."""

    def gpus_of(self, replica: int) -> tuple[int, ...]:
        """Empty: all of them."""
        own = len(self.gpus) > self.tensor_parallel
        return self.gpus[replica * self.tensor_parallel :][: self.tensor_parallel] if own else self.gpus


class RemoteEngineSpec(_EngineSpecBase):
    """Any OpenAI-compatible server that takes and gives token ids."""

    kind: Literal["remote"] = "remote"
    urls: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """Base URLs, ending in /v1: one a replica."""
    model: str
    """The name that it serves the model under."""
    key_env: str = ""
    """The environment variable that holds its API key."""
    on_update: Literal["finish", "restart"] = "finish"
    """What becomes of requests under way when a version comes."""


EngineSpec = Annotated[HfEngineSpec | ServerEngineSpec | VllmEngineSpec | RemoteEngineSpec, Field(discriminator="kind")]
