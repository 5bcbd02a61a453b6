"""Stop vLLM from packing weights on a CPU: packed weights can be neither written nor read back.

vLLM has no setting for it. So linear layers use vLLM's own fallback for weights that it cannot pack: torch with the
weight as it is. This must happen before the model is loaded. On GPUs vLLM does not pack, and nothing changes.
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
