"""Where the memory of training goes, by component, and the peak that was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.protocols import Optimizer, Policy
from tandem.types import Metrics, MicroBatch

_GIB = 2**30


class Memory:
    """GiB by component. What is always there is counted from its tensors; activations are counted as autograd keeps
    them, whenever a micro-batch is larger than any before."""

    def __init__(self, policy: Policy, optimizer: Optimizer) -> None:
        self._policy, self._optimizer = policy, optimizer
        self._largest = 0
        self._gib: Metrics = {}

    @contextmanager
    def forward(self, micro: MicroBatch) -> Iterator[None]:
        size = micro.ids_BT.numel()
        if size <= self._largest:
            yield
            return
        self._largest = size
        weights = [tensor for _, tensor in self._policy.weights(0).tensors()]
        saved = _Saved(weights)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield
        state = self._optimizer.state()
        master = [tensor for name, tensor in state.items() if name.endswith("|master")]
        self._gib = {
            "memory/weights": size_bytes(weights) / _GIB,
            "memory/master": size_bytes(master) / _GIB,
            "memory/optimizer": (size_bytes(state.values()) - size_bytes(master)) / _GIB,
            "memory/activations": saved.bytes / _GIB,
            "memory/logits": self._policy.head_bytes(len(micro.target_N)) / _GIB,
        }

    def metrics(self, gradient_bytes: int) -> Metrics:
        """`gradient_bytes`: of the gradients that exist at once."""
        if not self._gib:
            return {}
        peak = {}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            peak = {"memory/peak": torch.cuda.max_memory_allocated() / _GIB}
        return {**self._gib, "memory/gradients": gradient_bytes / _GIB, **peak}


class _Saved:
    """Bytes that a graph keeps, each storage once, weights left out."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in weights}
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


def size_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
