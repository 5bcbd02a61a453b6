"""An adapter beside the base's product is the adapter behind it: with vLLM's own kernels, in graphs and out of them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.inside.lora_layers import apply_beside, fitting

pytestmark = pytest.mark.gpu
WIDTH, SLICES, RANK, SLOTS = 1024, (512, 256, 256), 16, 3


@pytest.fixture(scope="module")
def ops() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    os.environ.setdefault("VLLM_LORA_ENABLE_DUAL_STREAM", "1")
    pytest.importorskip("vllm")
    from vllm.lora.ops import triton_ops  # pyright: ignore[reportMissingImports]

    return triton_ops


def layer_of(ops: Any, tokens: int) -> Any:
    torch.manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.1

    meta = ops.LoRAKernelMeta.make(SLOTS, tokens, "cuda")
    slots = torch.arange(tokens, device="cuda", dtype=torch.int32) % SLOTS - 1  # every third token has none
    meta.prepare_tensors(slots)
    given = meta.meta_args(tokens, False)
    weight = made(sum(SLICES), WIDTH)
    return SimpleNamespace(
        output_slices=SLICES,
        lora_a_stacked=tuple(made(SLOTS, 1, RANK, WIDTH) for _ in SLICES),
        lora_b_stacked=tuple(made(SLOTS, 1, size, RANK) for size in SLICES),
        base_layer=weight,
        slots=slots,
        _events=[torch.cuda.Event(), torch.cuda.Event()],
        _lora_stream=torch.cuda.Stream(),
        _get_quant_method=lambda: SimpleNamespace(apply=lambda w, x, bias: torch.nn.functional.linear(x, w, bias)),
        punica_wrapper=SimpleNamespace(
            add_shrink=lambda low, x, a, scale: ops.lora_shrink(x, a, low, *given, scale),
            add_expand=lambda y, low, b, slices: ops.lora_expand(
                low, b, y, *given, offset_start=0, add_inputs=True
            ),
        ),
    )  # fmt: skip


def expected(layer: Any, x: Tensor) -> Tensor:
    """In float64, token by token."""
    rows: list[Tensor] = []
    for row, slot in zip(x.double(), layer.slots.tolist(), strict=True):
        y = layer.base_layer.double() @ row
        if slot >= 0:
            parts = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
            y = y + torch.cat([b[slot, 0].double() @ (a[slot, 0].double() @ row) for a, b in parts])
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, 8, 64, 128, 129, 256, 300])
def test_it_is_what_the_adapter_adds(ops: Any, tokens: int, monkeypatch: pytest.MonkeyPatch):
    chosen = fitting(ops.utils.get_lora_op_configs)
    for module in (ops.lora_shrink_op, ops.lora_expand_op):
        monkeypatch.setattr(module, "get_lora_op_configs", chosen)
    layer = layer_of(ops, tokens)
    x = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        whole = expected(layer, x)
        scale = whole.abs().max()
        assert (apply_beside(layer, x) - whole).abs().max() < 0.01 * scale
        assert (apply_beside(layer, x[None])[0] - whole).abs().max() < 0.01 * scale
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = apply_beside(layer, x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert (captured - expected(layer, x)).abs().max() < 0.01 * scale
