"""Engines that serve something else than what arrived, for test_trapped_engines.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.engine.hf.engine import EmbeddedEngine
from tandem.engine.pool import EnginePool
from tandem.types import Served


class CountsOn(EmbeddedEngine):
    """200 OK, and its version is the one that was asked for."""

    async def load(self, version: int) -> Served:
        if version < 2:
            return await super().load(version)
        self.version, self.cache_epoch = version, self.cache_epoch + 1
        return Served(version, await self.fingerprints(), (self.boot_id,), self.cache_epoch)


def _slots(cache: Any) -> Any:
    return cache.layers


class KeepsPrefixes(EmbeddedEngine):
    """A prefix cache that is keyed by the prompt alone. Its epoch rises like everybody's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        self.plain, self.passes.prefill = self.passes.prefill, self.prefill

    def prefill(self, wave: Any, running: Any) -> Tensor:
        logits, passes = self.plain(wave, running), self.passes
        [request] = wave
        last, row = len(request.prompt) - 1, len(running)
        layers = [(layer.keys[row, :, :last], layer.values[row, :, :last]) for layer in _slots(passes.cache)]
        old = self.kept.setdefault(tuple(request.prompt), [(keys.clone(), values.clone()) for keys, values in layers])
        for (keys, values), (old_keys, old_values) in zip(layers, old, strict=True):
            keys.copy_(old_keys)
            values.copy_(old_values)
        # The last token of the prompt goes through the model again, as after a hit of all that is before it.
        passes.state.last_S[row], passes.state.position_S[row] = request.prompt[-1], last
        logits[-1] = passes.decode([*running, request])[-1]
        return logits


class PackedHead(torch.nn.Module):
    def __init__(self, weight_VH: Tensor) -> None:
        super().__init__()
        self.packed = weight_VH.detach().clone()

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.packed)


class ReachesOne(EnginePool):
    def __init__(self, engines: list[Any]) -> None:
        super().__init__(engines)
        self.reached = engines[0]

    async def load(self, version: int) -> Served:
        return await (super() if version < 2 else self.reached).load(version)
