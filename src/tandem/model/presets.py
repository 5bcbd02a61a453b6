"""Models made from scratch: Qwen3 architecture, sizes for a laptop."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512},
    "small": {"num_hidden_layers": 8, "hidden_size": 320, "num_attention_heads": 5, "intermediate_size": 896},
    "medium": {"num_hidden_layers": 12, "hidden_size": 576, "num_attention_heads": 9, "intermediate_size": 1536},
}


def make_model(preset: str, tokenizer: Any, seed: int, attention: str = "sdpa") -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size = SIZES[preset]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        head_dim=size["hidden_size"] // size["num_attention_heads"],
        num_key_value_heads=size["num_attention_heads"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
        **size,
    )
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
