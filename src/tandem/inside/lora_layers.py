"""How vLLM's layers compute with an adapter: beside the base's product, and in blocks that fit.

x A and then B: two kernels a layer, which vLLM launches behind the base's product x W, so that a step waits for all
three in turn. With its second stream (VLLM_LORA_ENABLE_DUAL_STREAM) both run beside x W, and a third adds them to it:
one launch more, and one rounding more. Here x A alone runs beside x W, and B is applied to the sum as ever. Kernels are
vLLM's own; their block sizes are not, where a step has few tokens: of 64 parts that its shrinking is cut into, 56 find
nothing to multiply in a layer of 2,048 inputs, and add that up, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.inside.sampling import Unfit

FLAG = "VLLM_LORA_ENABLE_DUAL_STREAM"
BESIDE_TOKENS = 128  # with more of them x W leaves no room on a GPU, and there is less to be hidden
FEW_TOKENS = 256
_PART = 128  # inputs of one block: a part each, so that every block multiplies once

Config = dict[str, Any]


def compute_beside() -> None:
    """From now on, in this process. Unfit if that cannot be. Before the model is loaded."""
    with _as_unfit():
        envs = _settings()
        if not envs.VLLM_LORA_ENABLE_DUAL_STREAM:
            raise Unfit(f"{FLAG} is off")
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA  # pyright: ignore[reportMissingImports]

        BaseLinearLayerWithLoRA._apply_async_impl  # noqa: B018 - what is replaced has to be there
        BaseLinearLayerWithLoRA._apply_async_impl = apply_beside


def fit_blocks() -> None:
    """The same for block sizes."""
    with _as_unfit():
        envs = _settings()
        if envs.VLLM_TUNED_CONFIG_FOLDER:
            raise Unfit("VLLM_TUNED_CONFIG_FOLDER says them")
        from vllm.lora.ops import triton_ops as ops  # pyright: ignore[reportMissingImports]

        if ops.utils.is_batch_invariant:
            raise Unfit("VLLM_BATCH_INVARIANT has them the same for any number of tokens")
        chosen = fitting(ops.utils.get_lora_op_configs)
        for module in (ops.lora_shrink_op, ops.lora_expand_op):
            module.get_lora_op_configs  # noqa: B018 - what is replaced has to be there
            module.get_lora_op_configs = chosen


def _settings() -> Any:
    from vllm import envs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]  # isort: skip

    if not current_platform.is_cuda():
        raise Unfit("vLLM's kernels for it are of NVIDIA's GPUs")
    return envs


@contextmanager
def _as_unfit() -> Iterator[None]:
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise Unfit(f"this vLLM's adapters are computed otherwise: {error}") from error


def apply_beside(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Stands where vLLM has both kernels on its second stream. `layer`: one of its linear layers with adapters."""
    flat, rank = x.flatten(0, -2), layer.lora_b_stacked[0].size(-1)
    # Of the stream that reads it last: nothing else comes to its memory before that.
    low = torch.empty((len(layer.output_slices), len(flat), rank), dtype=torch.float32, device=x.device)

    def base() -> Tensor:
        return layer._get_quant_method().apply(layer.base_layer, x, bias)

    def shrink() -> None:
        layer.punica_wrapper.add_shrink(low, flat, layer.lora_a_stacked, 1.0)

    if len(flat) <= BESIDE_TOKENS:
        fork, join = layer._events
        fork.record()
        output = base()
        with torch.cuda.stream(layer._lora_stream):
            fork.wait()
            shrink()
            join.record()
        join.wait()
    else:
        output = base()
        shrink()
    layer.punica_wrapper.add_expand(output.flatten(0, -2), low, layer.lora_b_stacked, layer.output_slices)
    return output


def fitting(theirs: Callable[..., Config]) -> Callable[..., Config]:
    """vLLM's block sizes, and others for few tokens."""

    @functools.lru_cache
    def chosen(op_type: str, **asked: Any) -> Config:
        config, tokens = theirs(op_type, **asked), asked["batch"]
        if tokens > FEW_TOKENS:
            return config
        if op_type == "shrink" and asked["hidden_size"] % _PART == 0:
            rows = 64 if tokens > 32 else 16
            return {**config, "block_m": rows, "block_k": _PART, "split_k": asked["hidden_size"] // _PART}
        if op_type == "expand":
            rows, inner = (32 if tokens > 16 else 16), (16 if asked["rank"] <= 16 else 32)
            return {**config, "block_m": rows, "block_n": 64, "block_k": inner}
        return config

    return chosen
