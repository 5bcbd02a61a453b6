"""On a CPU vLLM packs weights into a form of its own and drops them: what is packed is neither written nor read back.

There is no setting for it. So linear layers get here what vLLM itself falls back to where it cannot pack: the weight as
it is, given to torch. It must be done before the model is loaded; GPUs do not pack, and are left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def keep_weights_plain() -> None:
    from vllm.model_executor.layers import utils  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    packing = utils.dispatch_cpu_unquantized_gemm
    if not current_platform.is_cpu() or packing.__name__ == "keep_plain":
        return

    def keep_plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2:
            packing(layer, remove_weight)
        else:
            layer.cpu_linear = plain_linear

    utils.dispatch_cpu_unquantized_gemm = keep_plain


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)
