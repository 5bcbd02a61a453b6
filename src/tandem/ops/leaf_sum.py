"""Gradients of micro-batches that one process computes one after the other, added up in float32."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Gradients = dict[str, Tensor]


class LeafSum:
    """`take` adds what the last backward pass left at these parameters."""

    def __init__(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        self._parameters = parameters
        self._sums: Gradients = {}

    def take(self) -> None:
        for name, tensor in self._parameters:
            if tensor.grad is not None:
                earlier = self._sums.get(name)
                self._sums[name] = tensor.grad.float() if earlier is None else earlier.add_(tensor.grad)
                tensor.grad = None

    def forget(self) -> None:
        """Leave out what the last backward pass left."""
        for _, tensor in self._parameters:
            tensor.grad = None

    def sums(self) -> Gradients:
        """Return the sums; the next ones begin at zero."""
        taken, self._sums = self._sums, {}
        return taken
