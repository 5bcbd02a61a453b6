"""Decode steps of the embedded engine: with masks, or without, and then on a GPU as CUDA graphs.

There is a graph for each number of rows: live rows are filled up to the next number with dead ones, whose place in the
cache nothing but themselves reads before a prefill has written it.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.engine.hf.graphs_by_kind import GraphsByKind, PassKind, first_line, why_far
from tandem.engine.hf.kv_cache import KvCache
from tandem.engine.hf.row_state import RowState
from tandem.ops import attention_masks, option_report, packed_attention
from tandem.ops.lm_head import Head

_APART = ((1, 1), (3, 2), (7, 4), (64, 8), (128, 16), (256, 32), (512, 64))
"""Up to so many live rows, the numbers of rows that there are graphs of are so far apart."""


class DecodeSteps:
    def __init__(self, module: Any, head: Head, cache: KvCache, state: RowState, like: KvCache) -> None:
        """`like`: another cache of the same kind, for a trial."""
        self._head, self._cache, self._state = head, cache, state
        last_S = self._last_S = state.last_S
        self._mask = packed_attention.no_mask(last_S.device)
        self.graphs = GraphsByKind("decode steps", cache, last_S.device, most_rows=len(last_S))
        self.why_masked = packed_attention.why_not_steps(module)
        """Why steps need masks; empty if they do not."""
        if not self.why_masked:
            packed_attention.engage(module)
            self._try(like)

    @property
    def report(self) -> dict[str, Any]:
        return option_report.requested("graphs", self.why_masked or self.graphs.why_not)

    def rows_for(self, live: int) -> int:
        """Return with how many rows a step of so many live rows is run. With more rows the numbers are further apart:
        dead rows cost little there, and each number has to be recorded."""
        step = next((step for most, step in _APART if live <= most), _APART[-1][1])
        return min(-(-live // step) * step, len(self._last_S))

    def run(self, rows: int, *, adapters: int = 0, by_launches: bool = False) -> Tensor:
        """Return the logits of the first `rows` rows; valid until the next call. `adapters`: not 0 if rows have
        adapters, another number once these have moved. `by_launches`: this step is not like others of as many rows."""
        return self.graphs.run(PassKind(rows, adapters), partial(self._launched, rows), by_launches=by_launches)

    def _launched(self, rows: int) -> Tensor:
        cache, last_S, position_S = self._cache, self._last_S[:rows], self._state.position_S[:rows]
        cache.num_rows, cache.copies, cache.positions, cache.view = rows, None, position_S, cache.length_held
        rotary_S = position_S + self._state.shift_S[:rows]
        hidden_S1H = self._head.hidden(last_S[:, None], rotary_S[:, None], self._mask, cache, ends=position_S + 1)
        return self._head.logits(hidden_S1H[:, 0])

    @torch.no_grad()
    def _try(self, cache: KvCache) -> None:
        """Compare a step without masks, and one that is a graph, with one that has masks."""
        head, device = self._head, self._last_S.device
        rows = min(3, cache.rows_held)
        ends_S = torch.tensor([3, 17, 9][:rows], device=device)
        ids_ST = (torch.arange(rows * 17, device=device).view(rows, 17) * 7 + 1) % head.num_ids
        position_T = torch.arange(18, device=device)
        cache.targets, cache.copies, cache.view = slice(rows), position_T[:rows], 17

        def mask(query: Tensor, keys: int) -> Any:
            return attention_masks.for_model(head.config, position_T[:keys] <= query, query, position_T[:keys])

        def without() -> Tensor:
            for states, before in kept:
                states.copy_(before)
            return head.hidden(ids_ST[:, :1], ends_S[:, None], self._mask, cache, ends=ends_S + 1)

        try:
            prompt_ST = position_T[None, :17].expand_as(ids_ST)
            head.hidden(ids_ST, prompt_ST, mask(position_T[None, None, :17, None], 17), cache)
            kept = [(states, states.clone()) for states in cache.states()]
            cache.num_rows, cache.copies, cache.positions, cache.view = rows, None, ends_S, 18
            with_S1H = head.hidden(ids_ST[:, :1], ends_S[:, None], mask(ends_S[:, None, None, None], 18), cache)
            found_S1H = without()
            self.why_masked = why_far(found_S1H, with_S1H, "steps without masks give another result than with masks")
            if not self.why_masked:
                self.graphs.try_out(without, found_S1H, with_S1H)
        except Exception as error:  # noqa: BLE001 - a kernel is compiled and run; the plain way is there for all else
            self.why_masked = first_line(error)


def logits_with_masks(head: Head, cache: KvCache, state: RowState, rows: int, longest: int) -> Tensor:
    """Return the logits of a step with masks, which every attention can take. `longest`: the length of the longest."""
    last_S, position_S, shift_S = state.last_S[:rows], state.position_S[:rows], state.shift_S[:rows]
    cache.num_rows, cache.copies, cache.positions = len(last_S), None, position_S
    cache.view = min(-(-longest // 16) * 16, cache.length_held)
    key_T, query_S111 = torch.arange(cache.view, device=last_S.device), position_S[:, None, None, None]
    mask = attention_masks.for_model(head.config, key_T <= query_S111, query_S111, key_T)
    return head.logits(head.hidden(last_S[:, None], (position_S + shift_S)[:, None], mask, cache)[:, 0])
