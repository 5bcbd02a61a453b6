"""Account for the memory of training by component, and measure the peak."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tandem.ops import release_host_memory
from tandem.ops.byte_sizes import GIVEN_BACK_BYTES, MemoryParts, peak
from tandem.protocols import Optimizer, Policy
from tandem.types import Metrics, MicroBatch

_log = logging.getLogger(__name__)
_GIB = 2**30
_FULL_STEPS = 3


class MemoryBreakdown:
    """Memory in GiB by component. Weights and states are counted from their tensors. Activations are measured after the
    forward pass of each micro-batch that is larger than all before."""

    def __init__(self, policy: Policy, optimizer: Optimizer, top_p: float) -> None:
        self._policy, self._optimizer, self._top_p = policy, optimizer, top_p
        self._on_gpu = next(iter(policy.trainable()))[1].is_cuda
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()  # each stage has its own peak
        self._largest_gib = max(size_bytes([tensor]) for _, tensor in policy.trainable()) / _GIB
        self._largest_micro = 0
        self._gib: Metrics = {}
        self._always = 0.0
        held = [part.tensor for part in policy.weights(0, "live").parts()]
        held_bytes = size_bytes([*held, *optimizer.state().values()])
        self.gives_back = not self._on_gpu and held_bytes >= GIVEN_BACK_BYTES
        self._logits_gib: tuple[float, ...] = (0.0, 0.0)
        self._full = FullGpu(lambda: torch.cuda.memory_stats().get("num_alloc_retries", 0))

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Wrap the part of a step that may be its peak. On a host, return free memory to the system, so that it does
        not count. If little memory is used, that would only cost time; a GPU's peak counts used memory anyway.
        """
        if not self.gives_back:
            yield
            return
        with release_host_memory.exact():
            yield

    @contextmanager
    def forward(self, micro: MicroBatch) -> Iterator[None]:
        with self.exact(), self._looked_at(micro):
            yield

    @contextmanager
    def _looked_at(self, micro: MicroBatch) -> Iterator[None]:
        size = micro.ids_BT.numel()
        if size <= self._largest_micro:
            yield
            return
        self._largest_micro = size
        weights = [part.tensor for part in self._policy.weights(0, "live").parts()]
        saved = _Saved(weights)
        before = torch.cuda.memory_allocated() if self._on_gpu else 0
        hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)
        with nullcontext() if self._on_gpu else hooks:  # hooks would make compiled layers compile again
            yield
        kept = torch.cuda.memory_allocated() - before if self._on_gpu else saved.bytes
        state = self._optimizer.state()
        on_device = [tensor for tensor in state.values() if tensor.device == micro.ids_BT.device]
        master = [state[name] for name in state if name.endswith("|master")]
        self._gib = {
            "memory/weights": size_bytes(weights) / _GIB,
            "memory/master": size_bytes(master) / _GIB,
            "memory/optimizer": (size_bytes(on_device) - size_bytes(master)) / _GIB,
            "memory/reference": self._policy.reference_bytes() / _GIB,
        }
        if self._on_gpu:  # for example an engine's kv cache
            self._gib["memory/other"] = before / _GIB - sum(self._gib.values())
        self._always = sum(self._gib.values())
        if self._on_gpu or not self._policy.hides_activations():
            self._gib["memory/activations"] = kept / _GIB
        self._logits_gib = tuple(held / _GIB for held in self._policy.head_bytes(len(micro.target_N), self._top_p))

    def metrics(self, gradient_bytes: int, num_micro: int) -> Metrics:
        """Return the memory by component. `gradient_bytes`: of the gradients in memory at one time."""
        if not self._gib:
            return {}
        forward, backward = self._logits_gib
        gib = {**self._gib, "memory/logits": max(forward, backward), "memory/gradients": gradient_bytes / _GIB}
        parts = MemoryParts(
            always=self._always,
            activations=gib.get("memory/activations", 0.0),
            gradients=gib["memory/gradients"],
            num_micro=num_micro,
            head_forward=forward,
            head_backward=backward,
            largest=self._largest_gib,
            update=self._optimizer.workspace_bytes / _GIB,
        )
        gib["memory/accounted"] = peak(parts)
        return gib

    def peak(self) -> Metrics:
        """Return the peak: on a GPU of this stage's allocations, otherwise of the whole process."""
        if self._on_gpu:
            return {"memory/peak": torch.cuda.max_memory_allocated() / _GIB, "memory/retries": self._full.since_last()}
        return {"memory/peak": release_host_memory.peak_bytes() / _GIB}


class FullGpu:
    """Counts how often torch found no memory for a tensor until it had given all that it kept back to the driver. The
    GPU does nothing meanwhile, and the memory has to be asked for again."""

    def __init__(self, retries: Callable[[], int]) -> None:
        self._retries, self._before, self._steps = retries, 0, 0

    def since_last(self) -> float:
        """Called after each step. The first steps are no sign: they find out what is needed."""
        now = self._retries()
        new, self._before = now - self._before, now
        self._steps += new > 0
        if new and self._steps == _FULL_STEPS:
            _log.warning(
                "the GPU is so full that torch gave memory back to the driver in %d steps, in this one %d times: steps "
                "take longer for it; a smaller micro_tokens leaves room",
                self._steps,
                new,
            )
        return float(new)


class _Saved:
    """Counts the bytes that a graph saves for backward: each storage once, without weights."""

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
