"""Where gradients go as backward makes them: kept until the step, or used up at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tandem.protocols import Optimizer
from tandem.types import Metrics

Named = Sequence[tuple[str, Tensor]]


class Collected:
    """All gradients of a step. Over several micro-batches they are summed in fp32: a bf16 sum loses its small terms."""

    def __init__(self, parameters: Named) -> None:
        self._parameters = parameters
        self._sums: dict[str, Tensor] = {}

    @contextmanager
    def collecting(self, num_micro: int) -> Iterator[None]:
        self.clear()
        narrow = [(name, tensor) for name, tensor in self._parameters if tensor.dtype != torch.float32]
        with _hooked(narrow if num_micro > 1 else [], self._add_up):
            yield

    def take(self) -> dict[str, Tensor]:
        """Return the gradients and drop them here, so that the caller frees the memory of each by dropping it."""
        found = ((name, self._sums.get(name, tensor.grad)) for name, tensor in self._parameters)
        taken = {name: gradient for name, gradient in found if gradient is not None}
        self.clear()
        return taken

    def clear(self) -> None:
        self._sums = {}
        for _, tensor in self._parameters:
            tensor.grad = None

    def _add_up(self, name: str, tensor: Tensor, gradient: Tensor) -> None:
        tensor.grad = None
        if name in self._sums:
            self._sums[name] += gradient
        else:
            self._sums[name] = gradient.float()


class Released:
    """Each gradient moves its parameter as soon as backward has made it, and is gone: they never exist together.

    The price: one micro-batch a step. The global norm is known only when all is done, so the clip goes by the running
    norm of earlier steps, or by what this step has shown so far if that is more. And a step cannot be taken back: a
    gradient that is not finite leaves its own parameter as it was, while others have moved.
    """

    def __init__(self, parameters: Named, optimizer: Optimizer, clip_norm: float, decay: float = 0.9) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._clip_norm, self._decay = clip_norm, decay
        self.running_norm = 0.0
        self.largest_bytes = 0
        """Of one gradient: as much as exists at once."""
        self._lr, self._square, self._skipped = 0.0, 0.0, 0

    @contextmanager
    def releasing(self, lr: float) -> Iterator[None]:
        self._lr, self._square, self._skipped = lr, 0.0, 0
        with _hooked(self._parameters, self._release):
            yield
        if not self._skipped:
            so_far = math.sqrt(self._square)
            self.running_norm = (
                self._decay * self.running_norm + (1 - self._decay) * so_far if self.running_norm else so_far
            )

    def metrics(self) -> Metrics:
        return {"grad/norm": math.sqrt(self._square), "release/skipped": float(self._skipped)}

    def _release(self, name: str, tensor: Tensor, gradient: Tensor) -> None:
        tensor.grad = None
        self.largest_bytes = max(self.largest_bytes, gradient.numel() * gradient.element_size())
        norm = total_norm([gradient])
        if not math.isfinite(norm):
            self._skipped += 1
            return
        self._square += norm**2
        known = max(self.running_norm, math.sqrt(self._square))
        self._optimizer.update({name: gradient}, self._lr, clip_scale(known, self._clip_norm))


def total_norm(gradients: Sequence[Tensor]) -> float:
    if not gradients:
        return 0.0
    return torch.stack([torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]).norm().item()


def clip_scale(norm: float, clip_norm: float) -> float:
    return min(1.0, clip_norm / (norm + 1e-6))


@contextmanager
def _hooked(parameters: Named, handle: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """`handle(name, parameter, gradient)` as soon as backward has made a gradient."""

    def hook(name: str) -> Callable[[Tensor], None]:
        def call(tensor: Tensor) -> None:
            assert tensor.grad is not None
            handle(name, tensor, tensor.grad)

        return call

    handles = [tensor.register_post_accumulate_grad_hook(hook(name)) for name, tensor in parameters]
    try:
        yield
    finally:
        for handle_ in handles:
            handle_.remove()
