"""Whether many tensors hold nothing but numbers, asked of their device once: each answer is a wait of its own."""

from __future__ import annotations

import torch
from torch import Tensor


class Finite:
    def __init__(self) -> None:
        self._names: list[str] = []
        self._bounds: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and tensor.numel():
            comparable = tensor if tensor.element_size() > 1 else tensor.float()  # 8-bit types have no minimum
            self._names.append(name)
            self._bounds.append(torch.stack(comparable.detach().aminmax()).isfinite().all())  # a NaN is its own minimum

    def odd(self) -> list[str]:
        """Those of them that do not. Empty for none."""
        if not self._bounds:
            return []
        sound = torch.stack(self._bounds).tolist()
        return [name for name, whole in zip(self._names, sound, strict=True) if not whole]
