"""What vLLM's workers cannot hold as ranks hold it is refused by name, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.errors import SpecError
from tandem.model.engine_cuts import engine_cuts

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip


def model(kind: str = "Qwen3", **changes: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")(config)


def test_heads_and_rows_are_dealt_and_what_a_row_of_workers_adds_up_is_cut_by_columns() -> None:
    cuts = engine_cuts(model(attention_bias=True), 4)
    last = {name.removeprefix("model.layers.0."): cut for name, cut in cuts.items()}
    columns = {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    whole = {name for name in last if "norm" in name} | {"self_attn.o_proj.bias"}
    assert {name for name, cut in last.items() if cut == "cols"} == columns
    assert {name for name, cut in last.items() if cut == "whole"} == whole
    assert last["self_attn.q_proj.bias"] == last["model.embed_tokens.weight"] == last["lm_head.weight"] == "rows"


@pytest.mark.parametrize(
    ("ranks", "built", "told"),
    [
        (8, {}, "the model has 4 heads of keys and values, which cannot be dealt evenly to 8 workers"),
        (4, {"intermediate_size": 50}, "'model.layers.0.mlp.gate_proj.weight' has 50 rows or columns to cut"),
        (4, {"vocab_size": 132}, "'model.embed_tokens.weight' has 132 rows, which vLLM pads to a multiple of 64"),
        (
            2,
            {"kind": "Qwen3Moe", "num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
            "'model.layers.0.mlp.experts.gate_up_proj': experts are not cut as vLLM's workers cut it",
        ),
    ],
)
def test_the_name_and_a_way_out_are_told(ranks: int, built: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as refused:
        engine_cuts(model(**built), ranks)
    assert str(refused.value).startswith(f"sync.bridge = 'shared': {told}")
    assert "choose 'broadcast'" in str(refused.value)
