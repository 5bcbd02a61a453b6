"""`[engine]`: the engine that samples tokens."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tandem.spec.base import LocalPath, Spec
from tandem.spec.vllm_arguments import OF_EVERY_RUN, check_form, replaced
from tandem.types import OnUpdate


class _EngineSpecBase(Spec):
    deadline_s: float = Field(default=60.0, gt=0)
    """Seconds without a new token for any request, after which the engine counts as silent and the run ends."""


class _Batching(_EngineSpecBase):
    max_running: int = Field(default=256, ge=1, le=4096)
    """Most sequences decoded together."""
    max_context: int = Field(default=0, ge=0)
    """Most tokens of prompt plus completion; 0: the model's own limit."""
    replicas: int = Field(default=1, ge=1, le=8)
    """Number of engines; requests are spread over them."""


class _Embedded(_Batching):
    kv_gib: float = Field(default=4.0, gt=0)
    """GiB of memory for the kv cache; requests that do not fit wait."""
    eager: bool | Literal["auto"] = "auto"
    """true: decode steps have masks and are launched kernel by kernel. false: they have an attention kernel of their
    own; on a GPU they are CUDA graphs, as are prompts that come alone. auto: false on a GPU, true on a CPU."""


class HfEngineSpec(_Embedded):
    """The embedded engine: it runs in the trainer's process, on the trainer's module. Replicas share the module: they
    are for testing a set-up, and are not faster."""

    kind: Literal["hf"] = "hf"


class _Process(_Batching):
    url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL of an engine that already runs, as `tandem engine serve` prints it. Empty: the run starts its own."""
    token_file: Annotated[str, LocalPath()] = ""
    """With `url`: the file with its token."""
    start_deadline_s: float = Field(default=300.0, gt=0)
    """Seconds for the engine to become ready."""
    max_restarts: int = Field(default=3, ge=0)
    """How often the run restarts its own engine after it died."""


class ServerEngineSpec(_Embedded, _Process):
    """The embedded engine in its own process."""

    kind: Literal["server"] = "server"
    on_update: OnUpdate = "continue"
    """What happens to requests in flight when a version arrives. continue: they continue with the new weights and a
    recomputed kv cache. finish: the engine completes them with the old weights first. restart: they are sampled again
    from their prompt."""


class VllmEngineSpec(_Process):
    """vLLM in its own process and its own Python environment."""

    kind: Literal["vllm"] = "vllm"
    python: Annotated[str, LocalPath()] = ""
    """Path of vLLM's Python interpreter. Empty: the one that `tandem engine install vllm` created."""
    tensor_parallel: int = Field(default=1, ge=1, le=8)
    """Number of GPUs that one copy of the model is split over."""
    memory_share: float = Field(default=0.9, gt=0, lt=1)
    """Share of each GPU's memory for the engine, weights included. It must be free when the engine starts or wakes."""
    sleep: Literal["auto", "free", "keep"] = "auto"
    """The engine's GPU memory while the trainer steps. free: the engine drops its kv cache and moves its weights to the
    host, so that the trainer can use the memory; it samples nothing meanwhile. keep: the engine keeps it. auto: free if
    both are on one GPU and train.max_lag = 0, where the engine would be idle anyway; else keep."""
    eager: bool = False
    """true: no CUDA graphs; the engine starts sooner and decodes more slowly."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    """Numbers of the engine's GPUs, among the GPUs visible to the run; empty: all. With several replicas: either
    `tensor_parallel` GPUs that all replicas share, or `tensor_parallel` for each replica, in their order."""
    on_update: Literal["auto", OnUpdate] = "auto"
    """What happens to requests in flight when a version arrives. continue: they continue with the new weights and a
    recomputed kv cache; requests under an adapter end with the adapter that they began with. finish: the engine
    completes them with the old weights first. restart: they are sampled again from their prompt. auto: continue
    requests where the engine supports it; otherwise wait for them to finish."""

    arguments: tuple[str, ...] = Field(default=(), strict=False)
    """Further arguments of `vllm serve`, as ["--max-num-batched-tokens", "16384"]. Those that Tandem sets itself are
    refused. `tandem plan` does not read them."""

    @model_validator(mode="after")
    def _arguments_replace_nothing(self) -> Self:
        check_form(self.arguments)
        if name := replaced(self.arguments, OF_EVERY_RUN):
            field = OF_EVERY_RUN[name]
            raise ValueError(f"engine.arguments: --{name} is set by Tandem{field and f': set {field}'}")
        if self.arguments and self.url:
            raise ValueError("engine.arguments: are of a vLLM that the run starts, and engine.url names one that runs")
        return self

    @property
    def numbered_gpus(self) -> tuple[int, ...]:
        """The GPUs of all engines that the run starts."""
        return () if self.url else self.gpus or tuple(range(self.tensor_parallel))

    def engines_on(self, gpu: int) -> int:
        """Return how many engines the run starts on this GPU. The trainer's ranks have the first GPUs."""
        separate = len(self.gpus) > self.tensor_parallel
        return (gpu in self.numbered_gpus) * (1 if separate else self.replicas)

    def gpus_of(self, replica: int) -> tuple[int, ...]:
        """Return the GPU numbers of one replica; empty means all GPUs."""
        separate = len(self.gpus) > self.tensor_parallel
        return self.gpus[replica * self.tensor_parallel :][: self.tensor_parallel] if separate else self.gpus


class RemoteEngineSpec(_EngineSpecBase):
    """Any OpenAI-compatible server that accepts and returns token ids."""

    kind: Literal["remote"] = "remote"
    urls: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """Base URLs, ending in /v1: one for each replica."""
    model: str
    """Name of the model on the server."""
    key_env: str = ""
    """Environment variable with the API key; empty: no key."""
    on_update: Literal["finish", "restart"] = "finish"
    """What happens to requests in flight when a version arrives. finish: they end first. restart: they are sampled
    again from their prompt."""


EngineSpec = Annotated[HfEngineSpec | ServerEngineSpec | VllmEngineSpec | RemoteEngineSpec, Field(discriminator="kind")]
