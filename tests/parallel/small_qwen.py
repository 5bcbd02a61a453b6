"""A Qwen3 of two layers, whose 259 token ids no number of ranks divides."""

from __future__ import annotations

from typing import Any

import torch


def small_qwen(*, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied,
    )  # fmt: skip
    module: Any = Qwen3ForCausalLM(config)
    return module.to(dtype)
