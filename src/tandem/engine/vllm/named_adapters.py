"""Serve several adapters of one base on one vLLM, each under a name of its own.

consumes: adapters, as tensors     waits for: the workers to read them; vLLM to load them
produces: the name that vLLM knows each by; proof that its slot holds what was sent

Order of messages: the tensors go into a file in memory; `tandem_put` makes each worker read it, compare fingerprints
and stage it; vLLM loads it (`/v1/load_lora_adapter`); `tandem_adapter` returns digests of the slot that requests use,
and they are compared here. Only then does the adapter have its name. An adapter never changes: one that is put in place
of another is a new one to vLLM, with its own cached prefixes, and the old one ends once no request uses it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.engine.vllm.weight_update import WeightUpdate
from tandem.errors import EngineError, SyncError
from tandem.io.file_system import memory_backed
from tandem.ops import digest
from tandem.types import Fingerprints

_POLL_S = 0.01


class NamedAdapters:
    def __init__(self, exchange: WeightUpdate, num_slots: int) -> None:
        self._exchange, self._num_slots = exchange, num_slots
        self._loaded: dict[str, str] = {}
        """vLLM's name of each."""
        self._changing = asyncio.Lock()
        self._dtype = ""

    def __len__(self) -> int:
        return len(self._loaded)

    def model(self, name: str) -> str:
        """Return vLLM's name of an adapter. EngineError if there is none."""
        if name not in self._loaded:
            raise EngineError(f"engine: there is no adapter '{name}'")
        return self._loaded[name]

    async def put(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], expected: Fingerprints | None
    ) -> None:
        """As EmbeddedEngine.put_adapter."""
        async with self._changing:
            if self._exchange.num_adapters >= self._num_slots > 0:
                raise SyncError(
                    f"adapter '{name}': all {self._num_slots} slots of vLLM have adapters; drop one, or start it with "
                    "more (--adapter-slots)"
                )
            self._dtype = self._dtype or await self._exchange.adapter_dtype()
            with tempfile.TemporaryDirectory(prefix="tandem-adapter-", dir=memory_backed()) as home:
                path = Path(home) / "adapter.safetensors"
                sent = await asyncio.to_thread(_written, tensors, getattr(torch, self._dtype), expected, path)
                try:
                    loaded = await self._exchange.load_beside(path, int(config["r"]), sent)
                except (SyncError, EngineError) as error:
                    raise SyncError(f"adapter '{name}': {error}") from error
            old, self._loaded[name] = self._loaded.get(name), loaded
            while old is not None and self._exchange.is_asked(old):
                await asyncio.sleep(_POLL_S)
            if old is not None:
                await self._exchange.drop_beside(old)

    async def drop(self, name: str) -> None:
        """EngineError while a request uses it."""
        async with self._changing:
            if (loaded := self._loaded.get(name)) is None:
                return
            if self._exchange.is_asked(loaded):
                raise EngineError(f"engine: adapter '{name}' answers a request now")
            del self._loaded[name]
            await self._exchange.drop_beside(loaded)


def _written(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, expected: Fingerprints | None, path: Path
) -> Fingerprints:
    """Write an adapter in the type that vLLM computes it in; return its fingerprints."""
    from safetensors.torch import save_file

    cast = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(cast, path)
    if expected is not None and all(cast[name] is tensor for name, tensor in tensors.items()):
        return expected
    return digest.fingerprints(cast)
