"""Add a LoRA adapter to a plain module: forward hooks on the linear layers add its matrices' output.

One adapter at a time. Names are PEFT's, as they are sent: base_model.model.<layer>.lora_A.weight; B is scaled already.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.ops.named_tensors import Finite

_PREFIX = "base_model.model."


class HookedAdapter:
    def __init__(self, module: Any) -> None:
        self._module = module
        self._layers: dict[str, torch.nn.Linear] = {}
        self._held: Mapping[str, Tensor] = {}
        self._hooks: list[Any] = []

    def check(self, arrived: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Raise SyncError unless the tensors are an adapter of this module, and finite."""
        self.check_shapes(arrived, config)
        finite = Finite()
        for name, tensor in arrived.items():
            finite.add(name, tensor)
        if odd := finite.odd():
            raise SyncError(f"adapter: '{odd[0]}' is not finite")

    def check_shapes(self, arrived: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Raise SyncError unless the tensors fit this module's layers."""
        rank = config.get("r")
        if not arrived:
            raise SyncError("the adapter that arrived is empty: only the base would be served")
        owners = {name.removesuffix(".weight").rpartition(".")[0] for name in arrived}
        for owner in owners:
            pair = [arrived.get(f"{owner}.lora_{side}.weight") for side in "AB"]
            layer = self.layer(owner)
            a, b = pair
            if a is None or b is None:
                raise SyncError(f"adapter: '{owner}' has only one of its two matrices")
            found, wanted = [list(a.shape), list(b.shape)], [[rank, layer.in_features], [layer.out_features, rank]]
            if found != wanted:
                raise SyncError(f"adapter: '{owner}' has matrices of shapes {found}; rank {rank} needs {wanted} here")
        if len(arrived) != 2 * len(owners):
            raise SyncError(f"adapter: {len(arrived)} tensors for {len(owners)} layers: some are of another kind")

    def use(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self._held.keys():
            for hook in self._hooks:
                hook.remove()
            owners = sorted({name.removesuffix(".lora_A.weight") for name in tensors if ".lora_A." in name})
            self._hooks = [self.layer(owner).register_forward_hook(partial(self._add, owner)) for owner in owners]
        self._held = tensors

    def serving(self) -> Mapping[str, Tensor]:
        return self._held

    def _add(self, owner: str, _layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        a, b = self._held[f"{owner}.lora_A.weight"], self._held[f"{owner}.lora_B.weight"]
        narrow = torch.nn.functional.linear(inputs[0].to(a.dtype), a)
        return output + torch.nn.functional.linear(narrow, b).to(output.dtype)

    def layer(self, owner: str) -> torch.nn.Linear:
        if (known := self._layers.get(owner)) is not None:
            return known
        try:
            layer = self._module.get_submodule(owner.removeprefix(_PREFIX))
        except AttributeError:
            layer = None
        if not owner.startswith(_PREFIX) or not isinstance(layer, torch.nn.Linear):
            raise SyncError(f"adapter: '{owner}' names no linear layer of this model")
        self._layers[owner] = layer
        return layer
