"""What `vllm serve` is started with: for every run, for its device, and for its model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tandem.engine.vllm.tested_versions import is_since
from tandem.errors import EngineError, SpecError
from tandem.io.engine_messages import decoded
from tandem.ops.vllm_token_protocol import URGENT_PLACES
from tandem.spec.vllm_arguments import as_given, names_in, replaced

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts for --max-lora-rank
_EXTENSION = "tandem.vllm_worker.extension.TandemWorker"
_MIDDLEWARE = "tandem.vllm_worker.together_route.TogetherRoute"
_SCHEDULER = "tandem.vllm_worker.scheduler.scheduler"
_COMPILED = '{"tandem_adapters": 1}'  # separates code that was compiled with vllm_worker/lora_layers.py in vLLM's cache
_RECURRENT = ("linear", "conv", "mamba")  # in the names of kinds of layers
_MAMBA = "mamba_d_state"  # in the configuration of a model with such layers, whether or not it names kinds
_ONE_MORE = ("cohere2", "cohere2_moe")  # models whose layers see one token more than their sliding window in vLLM 0.32
_ROTARY_BY_HEAD = ("lfm2", "lfm2_moe")  # vLLM's kernel for CPUs takes their queries and keys for another shape
_TORCH_ROTARY = '{"custom_ops": ["all", "-rotary_embedding"]}'
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class VllmOptions:
    model: str
    python: str
    dtype: str = "auto"
    device: str = "cuda"
    tensor_parallel: int = 1
    memory_share: float = 0.9
    max_running: int = 256
    max_context: int = 0
    eager: bool = False
    sleeps: bool = False
    """Whether it frees GPU memory while it sleeps, if the device supports that."""
    adapter_slots: int = 0
    """Number of adapter versions that may be in use at a time; 0: no adapters."""
    max_rank: int = 16
    seed: int = 0
    unchecked: bool = False
    """Whether to accept a version that has not passed the conformance suite; for the suite itself."""
    further: Sequence[str] = ()
    """The user's own arguments (engine.arguments)."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def why_awake(self) -> str:
        """Return why it cannot free memory; empty if it can."""
        return "vLLM's CPU build has no sleep mode: it only pauses" if self.device == "cpu" else ""

    @cached_property
    def sees(self) -> bool:
        """Whether the model takes images, and is of a family whose images are known."""
        return self._kind == "qwen3_vl"

    @cached_property
    def _config(self) -> dict[str, Any]:
        try:
            return decoded((Path(self.model) / "config.json").read_bytes())
        except OSError:
            return {}

    @property
    def _kind(self) -> str:
        return self._config.get("model_type", "")

    def arguments(self, socket: Path, version: str) -> list[str]:
        """Return the arguments. SpecError if one of the user's own would replace one of them."""
        ours = [
            *("--model", self.model, "--served-model-name", "base", "--uds", str(socket)),
            *self._of_every_run(version),
            *(self._for_adapters() if self.adapter_slots else ()),
            *(self._on_cpu() if self.device == "cpu" else self._on_gpu()),
            *self._for_model(version),
        ]
        if name := replaced(self.further, names_in(ours)):
            raise SpecError(
                f"engine.arguments: --{name} is set for this model, as `{as_given(name, ours)}`; leave it out"
            )
        return [*ours, *self.further]

    def _of_every_run(self, version: str) -> Iterator[str]:
        yield from ("--dtype", self.dtype, "--tensor-parallel-size", str(self.tensor_parallel))
        yield from ("--max-num-seqs", str(self.max_running + URGENT_PLACES), "--seed", str(self.seed))
        yield from ("--worker-extension-cls", _EXTENSION, "--scheduler-cls", _SCHEDULER, "--middleware", _MIDDLEWARE)
        # Logprobs of the sampled distribution, not of the model before temperature.
        yield from ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
        yield "--disable-uvicorn-access-log"
        if is_since(version, 0, 32):  # token ids in and out must be enabled
            yield "--enable-scale-out"
        if self.max_context:
            yield from ("--max-model-len", str(self.max_context))
        if self.eager:
            yield "--enforce-eager"
        if self.sleeps and not self.why_awake:
            yield "--enable-sleep-mode"

    def _for_adapters(self) -> Iterator[str]:
        # vLLM's CPU build computes rows without an adapter with its last slot, which therefore stays empty.
        slots = str(self.adapter_slots + (self.device == "cpu"))
        rank = next(rank for rank in _RANKS if rank >= self.max_rank)
        yield from ("--enable-lora", "--max-loras", slots, "--max-cpu-loras", slots, "--max-lora-rank", str(rank))
        if self.device != "cpu":
            yield from ("--additional-config", _COMPILED)

    def _on_gpu(self) -> Iterator[str]:
        yield from ("--gpu-memory-utilization", str(self.memory_share))
        if any(self._config.get(key) for key in _NUM_EXPERTS):  # other kernels reorder their weights
            yield from ("--moe-backend", "triton")

    def _on_cpu(self) -> Iterator[str]:
        # Otherwise it resets a request's random numbers after a part of a prompt, which a CPU's generator cannot.
        yield "--no-enable-chunked-prefill"
        text: dict[str, Any] = self._config.get("text_config") or self._config
        kinds = text.get("layer_types") or ()
        if _MAMBA in text or any(mark in kind for kind in kinds for mark in _RECURRENT):
            yield "--no-enable-prefix-caching"  # vLLM keeps their states by chunks of prompts
        if self.eager and self._kind in _ROTARY_BY_HEAD:
            yield from ("--compilation-config", _TORCH_ROTARY)

    def _for_model(self, version: str) -> Iterator[str]:
        window: int | None = self._config.get("sliding_window")
        if self._kind in _ONE_MORE and window and is_since(version, 0, 32):  # a trainer's layers see `window` tokens
            yield from ("--hf-overrides", json.dumps({"sliding_window": window - 1}))
        if self.sees:
            if not is_since(version, 0, 32):
                raise EngineError(
                    f"engine: vLLM {version} was not tested with a model that sees, and may have no "
                    "--mm-device-do-normalize; `tandem engine install vllm --version 0.32.0` installs one that was"
                )
            # Pixels come normalised, as the trainer sees them. Videos are not known here.
            yield from ("--no-mm-device-do-normalize", "--limit-mm-per-prompt", '{"video": 0}')
