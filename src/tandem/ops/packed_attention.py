"""Attention over packed sequences by a kernel that gets the bounds of each sequence, instead of a mask.

A masked row of T positions costs T^2, and the fast kernels take no mask. Here the rows are concatenated without their
padding. Every segment is a span of queries; its keys are its own, or with a shared prompt, the prompt's and its own,
gathered. The kernel aligns the causal diagonal to the end of the keys, as a branch needs.

transformers finds `attend` by the attention name in the model's config, and passes it the forward's argument `spans`.
Without it `attend` is transformers' own SDPA, because an embedded engine shares the module; its decode steps may pass
`ends`.

Shapes: T tokens of all rows, K gathered keys, H heads, D numbers per head.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tandem.ops import decode_attention
from tandem.types import PackedRows, Spans

NAME = "tandem_packed"


def pack(segments_BT: Tensor, parents_BT: Tensor, device: torch.device) -> PackedRows:
    """Return the spans of rows that are still on the CPU: reading them back from `device` would wait for it."""
    width, flat = segments_BT.shape[1], segments_BT.flatten()
    (tokens_T,) = torch.nonzero(flat >= 0, as_tuple=True)
    # Segments are counted by row: one number for all rows.
    most = int(flat.max()) + 1
    owner_T = tokens_T // width * most + flat[tokens_T]
    parent_T = tokens_T // width * most + parents_BT.flatten()[tokens_T]
    begins = [0, *(torch.nonzero(owner_T[1:] != owner_T[:-1]).flatten() + 1).tolist(), len(tokens_T)]
    owners, its_parents = owner_T[begins[:-1]].tolist(), parent_T[begins[:-1]].tolist()
    assert len(set(owners)) == len(owners), "a segment is in two places of its row"
    span_of = dict(zip(owners, pairwise(begins), strict=True))

    lengths_k, keys = list[int](), list[Tensor]()
    for owner, parent in zip(owners, its_parents, strict=True):
        ranges = [span_of[owner]] if owner == parent else [span_of[parent], span_of[owner]]
        keys += [torch.arange(*each) for each in ranges]
        lengths_k.append(sum(stop - start for start, stop in ranges))
    shared = owners != its_parents
    begins_k = [0, *torch.tensor(lengths_k).cumsum(0).tolist()]
    place_of = torch.zeros(flat.numel(), dtype=torch.long)
    place_of[tokens_T] = torch.arange(len(tokens_T))
    spans = (
        torch.tensor(begins, dtype=torch.int32, device=device),
        torch.tensor(begins_k, dtype=torch.int32, device=device),
        max(stop - start for start, stop in pairwise(begins)),
        max(lengths_k),
        torch.cat(keys).to(device) if shared else None,
    )
    return PackedRows(spans, tokens_T.to(device), place_of.to(device))


def why_not(module: Any) -> str:
    """Return why a model's rows need masks; empty if its attention may support spans, which a trial must show."""
    config = module.config.get_text_config()
    if next(module.parameters()).device.type != "cuda":
        return "the kernel is for GPUs"
    if config._attn_implementation != "sdpa":
        return f"model.attention = '{config._attn_implementation}'"
    if module.get_input_embeddings().weight.dtype not in (torch.bfloat16, torch.float16):
        return "the kernel computes in 16 bits; set precision.weights = 'bfloat16'"
    return why_not_heads(config, multiple=8)


def why_not_steps(module: Any) -> str:
    """Return why a model's decode steps need masks; empty if its attention may support `ends`, which a trial must
    show."""
    config = module.config.get_text_config()
    if config._attn_implementation not in ("sdpa", NAME):
        return f"model.attention = '{config._attn_implementation}'"
    if why := why_not_heads(config):
        return why
    return "triton is not installed" if next(module.parameters()).is_cuda and find_spec("triton") is None else ""


def why_not_heads(config: Any, *, multiple: int = 1) -> str:
    """Return why a kernel does not support the model's heads; empty if it does."""
    if getattr(config, "attn_logit_softcapping", None):
        return "the model's attention has a soft cap"
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return "" if size % multiple == 0 and size <= 256 else f"the kernel does not support heads of {size} numbers"


def no_mask(device: torch.device) -> Tensor:
    """Return the mask argument to pass with `spans`: it has four dimensions, so that transformers makes no mask."""
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def engage(module: Any) -> None:
    """Let the module's forward accept `spans` from now on."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without spans
    module.config.get_text_config()._attn_implementation = NAME


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    spans: Spans | None = None,
    ends: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention, as transformers calls it: with `spans` of one row, [1, H, T, D]; with `ends` of one new token
    for each row of a kv cache, as in ops/decode_attention.py."""
    if ends is not None:
        return decode_attention.attend(query[:, :, 0], key, value, ends, scaling, sliding_window)[:, None], None
    if spans is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
    query_THD, key_THD, value_THD = (each[0].transpose(0, 1) for each in (query, key, value))
    if (gather_K := spans[4]) is not None:
        key_THD, value_THD = key_THD.index_select(0, gather_K), value_THD.index_select(0, gather_K)
    return kernel(query_THD, key_THD, value_THD, spans, scaling, sliding_window)[None], None


def kernel(
    query_THD: Tensor, key_KHD: Tensor, value_KHD: Tensor, spans: Spans, scale: float | None, window: int | None
) -> Tensor:
    """The kernel behind torch's varlen_attn, whose own signature differs from version to version."""
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    options = (0.0, True, False)  # dropout, causal, debug
    flash = torch.ops.aten._flash_attention_forward
    return flash(query_THD, key_KHD, value_KHD, *spans[:4], *options, scale=scale, **sides)[0]
