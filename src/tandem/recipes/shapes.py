"""Checkpoints with the shape of a released model and random weights: for benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.io import atomic
from tandem.recipes import build

_IDLE = 151_403
"""Ids beside those of the presets' tokenizer."""
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def random_checkpoint(shape: str, path: Path, seed: int = 0, device: str = "cpu") -> None:
    """In bfloat16, with the tokenizer of the presets and as many ids as Qwen's. A large one is made sooner on a GPU, of
    other numbers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build.tokenizer_from_scratch(_IDLE)
    config = Qwen3Config(
        vocab_size=151936, head_dim=128, num_key_value_heads=8, max_position_embeddings=40960,
        dtype="bfloat16", bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        **{"tie_word_embeddings": True, **SHAPES[shape]},
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(device):
        module: Any = Qwen3ForCausalLM(config)
    with atomic.directory(path, durable=False) as directory:
        module.to(torch.bfloat16).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
