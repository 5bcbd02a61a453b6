"""Check which architectures can be batched, and make the attention masks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.errors import SpecError
from tandem.ops import packed_attention


def check_attention(config: Any) -> None:
    """Raise SpecError unless a mask describes the attention: a state-space or linear layer would mix sequences."""
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        unknown.add("ALiBi")  # it uses the distance in the row, which differs from that in a packed sequence
    if unknown or getattr(config, "num_kv_shared_layers", 0):
        raise SpecError(
            f"model: {config.model_type} has layers of kind {', '.join(sorted(unknown)) or 'shared key-value'}, which "
            "cannot be packed or batched by slots; use a model with full or sliding attention"
        )


def plainly_causal(config: Any) -> bool:
    """Return whether every layer is causal without a mask, and then uses its fast kernel."""
    return config._attn_implementation in ("sdpa", packed_attention.NAME) and not getattr(
        config.get_text_config(), "sliding_window", None
    )


def for_model(config: Any, allowed: Tensor, query_pos: Tensor, key_pos: Tensor) -> Any:
    """Return the `attention_mask` of the model's forward: one mask, or one per kind of layer.

    `allowed` is boolean and broadcasts to [B, 1, queries, keys]; positions broadcast to the same shape.
    """
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    if window is None or kinds == {"full_attention"}:
        return _typed(config, allowed)
    sliding = allowed & (query_pos - key_pos < window)
    if not kinds:
        return _typed(config, sliding)  # every layer has a sliding window, and the model takes one mask
    return {"full_attention": _typed(config, allowed), "sliding_attention": _typed(config, sliding)}


def _typed(config: Any, allowed: Tensor) -> Tensor:
    if config._attn_implementation != "eager":
        return allowed
    named = config.dtype or torch.float32
    dtype: Any = getattr(torch, named) if isinstance(named, str) else named  # save_pretrained leaves its name there
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)
