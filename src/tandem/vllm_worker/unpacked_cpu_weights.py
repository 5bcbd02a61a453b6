"""Stop vLLM from packing weights on a CPU: packed weights can be neither written nor read back.

vLLM has no setting for it. So linear layers use vLLM's own fallback for weights that it cannot pack: torch with the
weight as it is. Experts are computed one after the other. The kernel of a gated delta net's convolution is told that
its weight is plain. This must happen before the model is loaded. On GPUs vLLM does not pack, and nothing changes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SyncError

_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
_DELTA_NETS = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
_CONVOLUTIONS = ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu")


def _halves(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what computes with the gate in the first half of its input, and up in the second."""

    def computed(made: Tensor) -> Tensor:
        gate, up = made.chunk(2, dim=-1)
        return act(gate) * up

    return computed


def _by_turns(made: Tensor) -> Tensor:
    """Compute as gpt-oss, with gate and up by turns."""
    gate, up = made[..., ::2].clamp(max=7.0), made[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": _halves(torch.nn.functional.silu),
    "gelu": _halves(torch.nn.functional.gelu),
    "gelu_tanh": _halves(lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    "swigluoai": _by_turns,
}

COPY_OF_PACKED = "_cpu_unpacked_conv_weight"
"""The attribute in which vLLM keeps a plain copy of a convolution that it has packed."""


def keep_weights_plain() -> None:
    from vllm.model_executor.layers import utils  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    packing = utils.dispatch_cpu_unquantized_gemm
    if not current_platform.is_cpu() or packing.__name__ == "keep_plain":
        return

    plain_convolutions = _compute_plain_convolutions()

    def keep_plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta:
            packing(layer, remove_weight)
        elif layer.weight.ndim == 2:
            layer.cpu_linear = plain_linear
        elif not plain_convolutions:
            packing(layer, remove_weight)  # layer_readers.py refuses it

    utils.dispatch_cpu_unquantized_gemm = keep_plain
    try:
        experts = importlib.import_module(_EXPERTS).CPUUnquantizedExperts
    except ImportError:  # a vLLM without it; layer_readers.py refuses what that has
        return
    experts.process_weights_after_loading = lambda self, layer: None
    experts.apply = plain_experts


def _compute_plain_convolutions() -> bool:
    """Let the kernels of delta nets' convolutions take plain weights. Return whether this vLLM has those kernels."""
    try:
        kernels = importlib.import_module(_DELTA_NETS)
    except ImportError:
        return False
    if not all(hasattr(kernels, name) for name in _CONVOLUTIONS):
        return False
    for name in _CONVOLUTIONS:
        setattr(kernels, name, _with_plain_weight(getattr(kernels, name)))
    return True


def _with_plain_weight(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(theirs)
    def computed(*, weight: Tensor, is_weight_packed: bool, **given: Any) -> Tensor:
        return theirs(weight=weight.flatten(1), is_weight_packed=False, **given)

    return computed


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def computes_with_plain_experts(method: Any) -> bool:
    """Return whether this method of vLLM's for experts is `plain_experts`."""
    return getattr(type(getattr(method.moe_kernel, "fused_experts", None)), "apply", None) is plain_experts


def plain_experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    *others: Any,
    apply_router_weight_on_input: bool,
    **more: Any,
) -> None:
    """Compute the experts of each token. `w1`: gate and up, by expert; `w2`: down. `self` has their biases, if any."""
    bias_1, bias_2 = getattr(self, "w1_bias", None), getattr(self, "w2_bias", None)
    if (act := _ACTIVATIONS.get(activation.value)) is None:
        raise SyncError(f"layout: experts with '{activation.value}' are not computed on a CPU; use a GPU")
    shares = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, place = (topk_ids == expert).nonzero(as_tuple=True)
        made = act(plain_linear(hidden_states[token], w1[expert], None if bias_1 is None else bias_1[expert]))
        made = plain_linear(made, w2[expert], None if bias_2 is None else bias_2[expert]) * shares[token, place, None]
        output.index_add_(0, token, made.to(output.dtype))
