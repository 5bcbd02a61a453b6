"""An adapter beside the base's product equals one after it: with vLLM's kernels, with and without graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.vllm_worker.lora_layers import fitting, linear_beside

pytestmark = pytest.mark.gpu
WIDTH, SLICES, RANK, SLOTS = 1024, (512, 256, 256), 16, 3


@pytest.fixture(scope="module")
def ops() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    pytest.importorskip("vllm.lora")  # `vllm` alone would find the folder tests/vllm
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
    a = [made(SLOTS, 1, RANK, WIDTH) for _ in SLICES]
    b = [made(SLOTS, 1, size, RANK) for size in SLICES]
    return SimpleNamespace(a=a, b=b, weight=weight, slots=slots, meta=given)


def expected(layer: Any, x: Tensor) -> Tensor:
    """In float64, token by token."""
    rows: list[Tensor] = []
    for row, slot in zip(x.double(), layer.slots.tolist(), strict=True):
        y = layer.weight.double() @ row
        if slot >= 0:
            parts = zip(layer.a, layer.b, strict=True)
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

    def computed(x: Tensor) -> Tensor:
        return linear_beside(ops, x, layer.weight, None, layer.a, layer.b, list(layer.meta))

    with torch.inference_mode():
        whole = expected(layer, x)
        scale = whole.abs().max()
        assert (computed(x) - whole).abs().max() < 0.01 * scale
        assert (computed(x[None])[0] - whole).abs().max() < 0.01 * scale
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = computed(x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert (captured - expected(layer, x)).abs().max() < 0.01 * scale
