"""Check which architectures can be batched, and make the attention masks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.errors import SpecError
from tandem.ops import packed_attention

_MASKED = ("full_attention", "sliding_attention")
"""Kinds of layers that a mask describes."""
_RECURRENT = frozenset({"linear_attention", "conv", "mamba", "hybrid"})
"""Kinds of layers that read their row from its left; a hybrid layer has attention beside that."""


WAY_OUT = (
    "vLLM may (`tandem engine check --model` says so): for a run set engine.kind = 'vllm', to serve it pass --engine "
    "vllm. SFT and DPO need no engine"
)


ATTENDING = (*_MASKED, "hybrid")
"""Kinds of layers that have keys and values."""


def check_attention(config: Any) -> None:
    """Raise SpecError unless a mask describes the attention, or a state for each row the other layers, so that the
    embedded engine can batch sequences."""
    config = config.get_text_config()
    with_state = num_recurrent(config) and set(ATTENDING).intersection(config.layer_types)  # beside attention
    if (odd := beyond_masks(config)) and not with_state:
        raise SpecError(
            f"model: {config.model_type} has layers of kind {', '.join(odd)}, which the embedded engine cannot batch; "
            f"{WAY_OUT}"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise SpecError(_SHARED.format(config.model_type))


def computed_alone(config: Any) -> str:
    """Return why a sequence must have a row of its own where all layers compute the same rows; empty if sequences can
    share a row.

    A recurrent layer reads its row from the left without a mask, and ALiBi counts distances in the row. So a second
    sequence in the row would depend on the first one. Padding on the right changes nothing.
    """
    config = config.get_text_config()
    if getattr(config, "num_kv_shared_layers", 0):
        raise SpecError(_SHARED.format(config.model_type))
    odd = beyond_masks(config)
    return (
        f"{config.model_type} has layers of kind {', '.join(odd)}, so each sequence has a row of its own" if odd else ""
    )


def num_recurrent(config: Any) -> int:
    """Return how many layers read their row from its left, of a model whose other layers can all be masked; else 0."""
    config = config.get_text_config()
    kinds: list[str] = getattr(config, "layer_types", None) or []
    return sum(kind in _RECURRENT for kind in kinds) if _RECURRENT.issuperset(beyond_masks(config)) else 0


_SHARED = "model: {} has layers of kind shared key-value, which are not supported; use a model without them"


def beyond_masks(config: Any) -> list[str]:
    """Return the kinds of layers that no mask describes."""
    config = config.get_text_config()
    kinds: list[str] = getattr(config, "layer_types", None) or []
    odd = set(kinds).difference(_MASKED)
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        odd.add("ALiBi")
    return sorted(odd)


def plainly_causal(config: Any) -> bool:
    """Return whether every layer is causal without a mask, and then uses its fast kernel."""
    return config._attn_implementation in ("sdpa", packed_attention.NAME) and not getattr(
        config.get_text_config(), "sliding_window", None
    )


def of_prompts(config: Any, positions_T: Tensor) -> Any:
    """Return the mask of whole prompts; None where every layer is causal without one."""
    if plainly_causal(config):
        return None
    causal = (positions_T[:, None] >= positions_T)[None, None]
    return for_model(config, causal, positions_T[:, None], positions_T)


def of_prompts_that_end_together(config: Any, pads_P: Tensor, positions_T: Tensor) -> dict[str, Tensor]:
    """Return the masks of prompts that are padded on the left, of a model with recurrent layers: they get zeros for
    padding, which leave their state as it begins."""
    config = config.get_text_config()
    query, real_PT = positions_T[:, None], positions_T >= pads_P[:, None]
    # Padding sees itself: a query without keys is not finite.
    allowed_PTT = (positions_T <= query) & real_PT[:, None]
    allowed_PTT |= positions_T == query
    masks = for_model(config, allowed_PTT[:, None], query, positions_T)
    masked = masks if isinstance(masks, dict) else {"full_attention": masks}
    return masked | dict.fromkeys({"linear_attention", *config.layer_types}.difference(_MASKED), real_PT)


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
    recurrent = dict.fromkeys(kinds.difference(_MASKED))  # they take none
    return {**recurrent, "full_attention": _typed(config, allowed), "sliding_attention": _typed(config, sliding)}


def _typed(config: Any, allowed: Tensor) -> Tensor:
    if config._attn_implementation != "eager":
        return allowed
    named = config.dtype or torch.float32
    dtype: Any = getattr(torch, named) if isinstance(named, str) else named  # save_pretrained leaves its name there
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)
