"""Handle the activations that the backward pass needs: keep them, recompute them, or keep them in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Policy = Literal["keep", "selective", "recompute", "offload"]

_SMALL = 1 << 16
"""Least numbers in a tensor that is copied to the host."""


class Activations:
    """The handling of one module's activations. `why_not`: why the requested one is not engaged; empty if it is."""

    def __init__(self, module: Any, policy: Policy) -> None:
        self.why_not = ""
        self.hidden = policy == "selective"
        """Whether kept activations are hidden from autograd's hooks."""
        self._layers: list[Any] = []
        self._offload: _Offload | None = None
        if policy == "offload":
            if next(module.parameters()).device.type == "cpu":
                self.why_not = "the model is in host memory already"
            else:
                self._offload = _Offload(module)
        elif policy != "keep":
            if not module.supports_gradient_checkpointing:
                self.why_not = f"{type(module).__name__} has no layers that transformers can recompute"
                return
            options: dict[str, Any] = {"use_reentrant": False}
            if policy == "selective":
                options["context_fn"] = partial(create_selective_checkpoint_contexts, _dear)
            # Renamed in transformers 5.23; either one lets gradients reach adapters behind frozen inputs.
            enable = getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)
            enable(options)
            self._layers = [part for part in module.modules() if getattr(part, "gradient_checkpointing", False)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap a forward pass that is followed by a backward pass."""
        for layer in self._layers:
            layer.training = True  # recomputation checks this flag; the modules inside stay in eval mode
        try:
            with self._offload.hooks() if self._offload else nullcontext():
                yield
        finally:
            for layer in self._layers:
                layer.training = False


_OPS = torch.ops.aten
_DEAR = {
    _OPS.mm.default,
    _OPS.addmm.default,
    _OPS.bmm.default,
    _OPS._scaled_dot_product_flash_attention.default,
    _OPS._scaled_dot_product_efficient_attention.default,
    _OPS._scaled_dot_product_cudnn_attention.default,
    _OPS._scaled_dot_product_flash_attention_for_cpu.default,
}


def _dear(_context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE


class _Offload:
    """Moves activations to the host. torch's `save_on_cpu` would also copy each weight that a layer saves."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @contextmanager
    def hooks(self) -> Iterator[None]:
        weights = {tensor.untyped_storage().data_ptr() for tensor in self._module.parameters()}

        def pack(tensor: Tensor) -> Any:
            if tensor.numel() < _SMALL or tensor.untyped_storage().data_ptr() in weights:
                return tensor
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)  # ordered by this stream, as the copy back is
            return tensor.device, host

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            device, host = packed
            return host.to(device, non_blocking=True)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
