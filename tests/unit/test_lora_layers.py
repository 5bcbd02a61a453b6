"""Block sizes of vLLM's adapters: of few tokens ours, of all others vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.vllm_worker import lora_layers
from tandem.vllm_worker.lora_layers import BESIDE_TOKENS, FEW_TOKENS, compute_beside, fit_blocks, fitting
from tandem.vllm_worker.token_recorder import Unfit

THEIRS = {"block_m": 7, "block_n": 16, "block_k": 256, "split_k": 64, "num_warps": 4}


def chosen(op_type: str, **asked: Any) -> dict[str, Any]:
    defaults = {"max_loras": 4, "batch": 64, "hidden_size": 2048, "rank": 16, "num_slices": 3}
    return fitting(lambda op_type, **asked: THEIRS)(op_type, **(defaults | asked))


@pytest.mark.parametrize("width", [128, 896, 2048, 2560, 6144, 9728, 12288])
@pytest.mark.parametrize("tokens", [1, 64, FEW_TOKENS])
def test_every_input_is_of_one_block_and_no_block_is_empty(width: int, tokens: int):
    config = chosen("shrink", hidden_size=width, batch=tokens)
    assert config["block_k"] * config["split_k"] == width
    assert config["block_m"] <= max(16, 2 * tokens)
    assert {"num_warps", "block_n"} <= set(config)


def test_vllms_own_are_kept_for_many_tokens_odd_widths_and_other_kernels():
    assert chosen("shrink", batch=FEW_TOKENS + 1) == chosen("expand", batch=FEW_TOKENS + 1) == THEIRS
    assert chosen("shrink", hidden_size=2000) == chosen("fused_moe_lora_w13_shrink") == THEIRS


@pytest.mark.parametrize(("rank", "inner"), [(8, 16), (16, 16), (32, 32), (256, 32)])
def test_a_rank_is_gone_through_in_whole_blocks(rank: int, inner: int):
    assert chosen("expand", rank=rank)["block_k"] == inner


@pytest.mark.parametrize("engage", [compute_beside, fit_blocks])
def test_where_there_is_no_vllm_it_says_why_not(engage: Any):
    with pytest.raises(Unfit, match="computes adapters in another way"):
        engage()


def test_as_an_operator_it_compiles_and_is_of_the_shape_that_it_says(monkeypatch: pytest.MonkeyPatch):
    """With kernels in plain torch, and more tokens than are computed beside anything."""
    tokens = BESIDE_TOKENS + 1
    x, weight, bias = torch.randn(tokens, 8), torch.randn(6, 8), torch.randn(6)
    a, b = [torch.randn(2, 1, 3, 8), torch.randn(2, 1, 3, 8)], [torch.randn(2, 1, 4, 3), torch.randn(2, 1, 2, 3)]

    def shrink(x: torch.Tensor, a: list[torch.Tensor], low: torch.Tensor, slot: torch.Tensor, scale: float) -> None:
        low.copy_(torch.stack([x @ each[int(slot), 0].T for each in a]) * scale)

    def expand(low: torch.Tensor, b: list[torch.Tensor], y: torch.Tensor, slot: torch.Tensor, **_: Any) -> None:
        y += torch.cat([part @ each[int(slot), 0].T for part, each in zip(low, b, strict=True)], -1)

    ops = SimpleNamespace(lora_shrink=shrink, lora_expand=expand)
    name = "tandem_test::linear_beside"
    torch.library.define(name, lora_layers.SCHEMA)
    torch.library.impl(name, "CPU")(lambda *given: lora_layers.linear_beside(ops, *given))
    torch.library.register_fake(name)(lora_layers.shaped_as)
    op = torch.ops.tandem_test.linear_beside.default
    for given in (x, x[None]):
        asked = (given, weight, bias, a, b, [torch.tensor(1)])
        torch.library.opcheck(op, asked, test_utils=["test_schema", "test_faketensor"])
        added = torch.cat([x @ p[1, 0].T @ q[1, 0].T for p, q in zip(a, b, strict=True)], -1)
        found = op(*asked)
        assert torch.allclose(found.view(tokens, 6), x @ weight.T + bias + added, atol=1e-4)
