"""Speed up LoRA in vLLM's layers: run x A beside x W, and use block sizes that fit small batches.

vLLM launches two kernels a layer, x A and then B, after the base's product x W, so a step waits for all three in turn.
Here x A runs beside x W, and B is applied to the sum as before. The kernels are vLLM's own. Their block sizes are ours
where a step has few tokens: vLLM splits the shrink kernel into 64 parts, and in a layer of 2,048 inputs 56 of them have
nothing to multiply, and their results are summed all the same.

vLLM's own option (VLLM_LORA_ENABLE_DUAL_STREAM) runs both kernels on a second stream and adds them to x W by a third.
That is slower, and it compiles each layer separately, because the layer's name is part of the code: 45 s of a start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tandem.vllm_worker.token_recorder import Unfit

BESIDE_TOKENS = 128  # with more tokens x W fills the GPU, and there is less time to hide
FEW_TOKENS = 256
_PART = 128  # inputs of one block: one part each, so every block multiplies once

_OP = "tandem::linear_beside"
SCHEMA = "(Tensor x, Tensor weight, Tensor? bias, Tensor[] a, Tensor[] b, Tensor[] meta) -> Tensor"

Config = dict[str, Any]


def compute_beside() -> None:
    """Run x A beside x W from now on in this process. Unfit if that is impossible. Call before the model is loaded."""
    with _as_unfit():
        if _settings().VLLM_LORA_ENABLE_DUAL_STREAM:
            raise Unfit("VLLM_LORA_ENABLE_DUAL_STREAM is on")
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA  # pyright: ignore[reportMissingImports]
        from vllm.lora.ops import triton_ops  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # pyright: ignore[reportMissingImports]

        theirs, plain = BaseLinearLayerWithLoRA._apply_sync, UnquantizedLinearMethod
        torch.library.define(_OP, SCHEMA)
        torch.library.impl(_OP, "CUDA")(functools.partial(linear_beside, triton_ops))
        torch.library.register_fake(_OP)(shaped_as)

        def apply(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            if not isinstance(layer.base_layer.quant_method, plain):
                return theirs(layer, x, bias)
            wrapper, tokens = layer.punica_wrapper, x.numel() // x.size(-1)
            meta = wrapper.token_mapping_meta.meta_args(tokens, wrapper.lora_config.specialize_active_lora)
            a, b = list(layer.lora_a_stacked), list(layer.lora_b_stacked)
            return torch.ops.tandem.linear_beside(x, layer.base_layer.weight, bias, a, b, list(meta))

        BaseLinearLayerWithLoRA._apply_sync = apply


def fit_blocks() -> None:
    """Use our block sizes from now on in this process. Unfit if that is impossible."""
    with _as_unfit():
        envs = _settings()
        if envs.VLLM_TUNED_CONFIG_FOLDER:
            raise Unfit("VLLM_TUNED_CONFIG_FOLDER sets the block sizes")
        from vllm.lora.ops import triton_ops as ops  # pyright: ignore[reportMissingImports]

        chosen = fitting(ops.utils.get_lora_op_configs)
        for module in (ops.lora_shrink_op, ops.lora_expand_op):
            module.get_lora_op_configs  # noqa: B018 - it must exist to be replaced
            module.get_lora_op_configs = chosen


def _settings() -> Any:
    from vllm import envs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]  # isort: skip

    if not current_platform.is_cuda():
        raise Unfit("vLLM has these kernels for NVIDIA GPUs only")
    if envs.VLLM_BATCH_INVARIANT:
        raise Unfit("VLLM_BATCH_INVARIANT requires one way of computing for any number of tokens")
    return envs


@contextmanager
def _as_unfit() -> Iterator[None]:
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise Unfit(f"this vLLM computes adapters in another way: {error}") from error


def linear_beside(
    ops: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: list[Tensor], b: list[Tensor], meta: list[Tensor]
) -> Tensor:
    """Return x W plus x A B of the adapter that each token asks for. `ops`: vLLM's kernels, which take `meta`. `a`,
    `b`: for each slice of a fused layer, all slots."""
    flat = x.reshape(-1, x.size(-1))
    # Allocated on the stream that reads it last, so that its memory is not reused before.
    low = torch.empty((len(a), len(flat), b[0].size(-1)), dtype=torch.float32, device=x.device)
    if len(flat) <= BESIDE_TOKENS:
        here, beside = torch.cuda.current_stream(x.device), _second_stream(x.device)
        beside.wait_stream(here)
        output = linear(x, weight, bias)
        with torch.cuda.stream(beside):
            ops.lora_shrink(flat, a, low, *meta, 1.0)
        here.wait_stream(beside)
    else:
        output = linear(x, weight, bias)
        ops.lora_shrink(flat, a, low, *meta, 1.0)
    ops.lora_expand(low, b, output.view(len(flat), -1), *meta, offset_start=0, add_inputs=True)
    return output


def shaped_as(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: list[Tensor], b: list[Tensor], meta: list[Tensor]
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.size(0)))


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def fitting(theirs: Callable[..., Config]) -> Callable[..., Config]:
    """Return a function that gives vLLM's block sizes, or ours for few tokens."""

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
