"""Model sizes of `model.preset`: Qwen3 architecture, small enough for a laptop."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512},
    "small": {"num_hidden_layers": 8, "hidden_size": 320, "num_attention_heads": 5, "intermediate_size": 896},
    "medium": {"num_hidden_layers": 12, "hidden_size": 576, "num_attention_heads": 9, "intermediate_size": 1536},
}


def preset_config(preset: str, vocab_size: int) -> dict[str, Any]:
    """Return the fields of a Qwen3 config for a preset."""
    size = SIZES[preset]
    return {
        "vocab_size": vocab_size,
        "head_dim": size["hidden_size"] // size["num_attention_heads"],
        "num_key_value_heads": size["num_attention_heads"],
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        **size,
    }
