"""Attention of one new token a row over the rows of a kv cache, each up to its own end.

A mask makes SDPA read every row up to the longest one, and copy the keys that several heads share. Here each row's own
keys are read once, and nothing depends on the longest row. On a GPU it is a Triton kernel; elsewhere plain torch.

Shapes: S rows, H heads, K heads of keys, G heads that share keys (H = K * G), L positions, D numbers a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    query_SHD: Tensor, key_SKLD: Tensor, value_SKLD: Tensor, ends_S: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Return [S, H, D]. `ends_S`: how many positions of a row count, its newest included; at least 1. `window`: most of
    them that are seen."""
    factor: float = query_SHD.shape[-1] ** -0.5 if scale is None else scale
    if query_SHD.is_cuda:
        from tandem.ops import decode_attention_triton as kernel

        return kernel.attend(query_SHD, key_SKLD, value_SKLD, ends_S, factor, window or 0)
    rows, heads, size = query_SHD.shape
    query_SKGD = query_SHD.view(rows, key_SKLD.shape[1], -1, size)
    scores_SKGL = (query_SKGD.float() @ key_SKLD.float().transpose(2, 3)) * factor
    position_L = torch.arange(key_SKLD.shape[2], device=ends_S.device)
    seen_SL = position_L < ends_S[:, None]
    if window:
        seen_SL &= position_L >= ends_S[:, None] - window
    weights_SKGL = scores_SKGL.masked_fill_(~seen_SL[:, None, None], -torch.inf).softmax(-1)
    return (weights_SKGL @ value_SKLD.float()).view(rows, heads, -1).to(value_SKLD.dtype)
