"""Block sizes of vLLM's adapters: of few tokens ours, of all others vLLM's."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.inside.lora_layers import FEW_TOKENS, compute_beside, fit_blocks, fitting
from tandem.inside.sampling import Unfit

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
    with pytest.raises(Unfit, match="computed otherwise"):
        engage()
