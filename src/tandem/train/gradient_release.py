"""Handle gradients during the backward pass: collect them until the step, or apply each at once."""

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
    """Collects all gradients of a step. Over several micro-batches it sums in fp32, because bf16 loses small terms."""

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
        """Return the gradients and drop the references here, so that the caller can free each."""
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
    """Applies each gradient as soon as the backward pass has computed it, so that they are never in memory together.

    This has costs. A step has one micro-batch. The global norm is known only at the end, so clipping uses the larger of
    the running norm of earlier steps and the norm so far. And a step cannot be undone: a gradient that is not finite is
    skipped, while other parameters have changed.
    """

    def __init__(self, parameters: Named, optimizer: Optimizer, clip_norm: float, decay: float = 0.9) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._clip_norm, self._decay = clip_norm, decay
        self.running_norm = 0.0
        self.largest_bytes = 0
        """Size of the largest gradient: only one exists at a time."""
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
    """Call `handle(name, parameter, gradient)` as soon as the backward pass has computed a gradient."""

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
