"""Compute logprobs without a gradient through the context, which is everything before the first trained token.

The forward pass is the same. The gradient lacks the contribution through the context's keys and values. Sequences are
computed one by one, each after its own context.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.ops.lm_head import Head
from tandem.types import MicroBatch, TokenLogprobs


def logprobs(head: Head, micro: MicroBatch, temperature: float, top_p: float) -> TokenLogprobs:
    """Return the logprobs of every trained token, in the micro-batch's order."""
    values: list[Tensor] = []
    entropies: list[Tensor] = []
    for ids_T, sources_N, targets_N in _sequences(micro):
        hidden_SH, begins = _after_context(head, ids_T, int(sources_N[0]))
        scored = head.logprobs(hidden_SH[sources_N - begins], ids_T[targets_N], temperature, top_p)
        values.append(scored[0])
        entropies.append(scored[1])
    return TokenLogprobs(torch.cat(values), torch.cat(entropies))


def _after_context(head: Head, ids_T: Tensor, begins: int) -> tuple[Tensor, int]:
    """Return the hidden states from position `begins` on, which predicts the first trained token and has a gradient."""
    from transformers import DynamicCache

    positions_T = torch.arange(len(ids_T), device=ids_T.device)
    cache = DynamicCache()
    if begins:
        with torch.no_grad():
            head.hidden(ids_T[None, :begins], positions_T[None, :begins], None, cache)
    hidden_1SH = head.hidden(ids_T[None, begins:], positions_T[None, begins:], None, cache)
    return hidden_1SH[0], begins


def _sequences(micro: MicroBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each sequence's ids, the positions that predict its trained tokens, and the positions of those tokens."""
    width = micro.ids_BT.shape[1]
    for number in range(len(micro.group_S)):
        mine_N = micro.sequence_N == number
        first = int(micro.target_N[mine_N][0])
        row, column = divmod(first, width)
        segment = micro.segments_BT[row, column]
        if not torch.equal(micro.parents_BT[row], micro.segments_BT[row]):
            raise AssertionError("a frozen context does not support shared prompts")
        (inside_T,) = torch.nonzero(micro.segments_BT[row] == segment, as_tuple=True)
        start = row * width + int(inside_T[0])
        yield micro.ids_BT[row, inside_T], micro.source_N[mine_N] - start, micro.target_N[mine_N] - start
