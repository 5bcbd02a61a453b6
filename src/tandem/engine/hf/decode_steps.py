"""Decode steps of the embedded engine: with masks, or without, and then on a GPU as CUDA graphs.

A decode step of a small model is hundreds of launches, each of which takes the host longer than the GPU. A graph is
one launch. There is one for each number of rows: live rows are filled up to the next number with dead ones, whose place
in the cache nothing reads before a prefill has written it. A step is recorded once it has been run by launches, so that
no kernel is compiled meanwhile. A graph holds addresses: it is dropped when the cache or the weights move.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.engine.hf.kv_cache import KvCache
from tandem.engine.hf.row_state import RowState
from tandem.ops import attention_masks, option_report, packed_attention
from tandem.ops.batched_launches import record_graph
from tandem.ops.lm_head import Head

_log = logging.getLogger(__name__)

_NEAR = 0.1
"""Largest relative difference between steps with and without masks, which in 16 bits are rounded at every operation."""
_APART = ((1, 1), (3, 2), (7, 4), (64, 8), (128, 16), (256, 32), (512, 64))
"""Up to so many live rows, the numbers of rows that there are graphs of are so far apart."""
_RUNS_BEFORE = 2
"""A number of rows that comes up once, while a batch ends, is not worth a graph."""


class DecodeSteps:
    def __init__(self, module: Any, head: Head, cache: KvCache, state: RowState, *, layers: int) -> None:
        self._head, self._cache, self._state = head, cache, state
        last_S = self._last_S = state.last_S
        self._mask = packed_attention.no_mask(last_S.device)
        self._graphs, self._runs = dict[tuple[int, int], torch.cuda.CUDAGraph](), Counter[tuple[int, int]]()
        self._logits_SV: Tensor | None = None
        self._addresses: Sequence[int] = ()
        self._cache_moved, self._pool = -1, None
        self._why_no_graph = "" if last_S.is_cuda else "graphs are for GPUs"
        self.why_masked = packed_attention.why_not_steps(module)
        """Why steps need masks; empty if they do not."""
        if not self.why_masked:
            packed_attention.engage(module)
            self._try(layers)

    @property
    def report(self) -> dict[str, Any]:
        return option_report.requested("graphs", self.why_masked or self._why_no_graph)

    @property
    def recorded(self) -> list[int]:
        """The numbers of rows that there is a graph of."""
        return [rows for rows, _ in self._graphs]

    def rows_for(self, live: int) -> int:
        """Return with how many rows a step of so many live rows is run. With more rows the numbers are further apart:
        dead rows cost little there, and each number has to be recorded."""
        step = next((step for most, step in _APART if live <= most), _APART[-1][1])
        return min(-(-live // step) * step, len(self._last_S))

    def weights_at(self, addresses: Sequence[int]) -> None:
        """The weights of the next steps are there. Graphs of weights that are elsewhere are dropped."""
        if addresses != self._addresses:
            self._addresses = addresses
            self._drop()

    def run(self, rows: int, *, adapters: int = 0, by_launches: bool = False) -> Tensor:
        """Return the logits of the first `rows` rows; valid until the next call. `adapters`: not 0 if rows have
        adapters, another number once these have moved. `by_launches`: this step is not like others of as many rows."""
        if self._cache.moved != self._cache_moved:
            self._cache_moved = self._cache.moved
            self._drop()
        if by_launches:
            return self._launched(rows)
        kind = rows, adapters
        if (graph := self._graphs.get(kind)) is not None:
            assert self._logits_SV is not None
            graph.replay()
            return self._logits_SV[:rows]
        logits_SV = self._launched(rows)
        self._runs[kind] += 1
        if self._runs[kind] >= _RUNS_BEFORE and not self._why_no_graph:
            self._record(kind, logits_SV)
        return logits_SV

    def _launched(self, rows: int) -> Tensor:
        cache, last_S, position_S = self._cache, self._last_S[:rows], self._state.position_S[:rows]
        cache.num_rows, cache.copies, cache.positions, cache.view = rows, None, position_S, cache.length_held
        rotary_S = position_S + self._state.shift_S[:rows]
        hidden_S1H = self._head.hidden(last_S[:, None], rotary_S[:, None], self._mask, cache, ends=position_S + 1)
        return self._head.logits(hidden_S1H[:, 0])

    def _record(self, kind: tuple[int, int], like_SV: Tensor) -> None:
        rows, adapters = kind
        for other in [each for each in self._graphs if adapters and each[1] not in (0, adapters)]:
            del self._graphs[other]
        if self._logits_SV is None:
            self._logits_SV = like_SV.new_empty(len(self._last_S), like_SV.shape[1])
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()  # the last graph of a pool takes it along
        into_SV = self._logits_SV[:rows]
        try:
            self._graphs[kind] = record_graph(lambda: into_SV.copy_(self._launched(rows)), into_SV.device, self._pool)
        except RuntimeError as error:
            self._why_no_graph = _first_line(error)
            _log.warning("decode steps are launched one by one from now on: %s", self._why_no_graph)

    def _drop(self) -> None:
        self._graphs.clear()
        self._runs.clear()

    @torch.no_grad()
    def _try(self, layers: int) -> None:
        """Compare a step without masks, and one that is a graph, with one that has masks."""
        head, device = self._head, self._last_S.device
        ends_S = torch.tensor([3, 17, 9], device=device)
        ids_ST = (torch.arange(3 * 17, device=device).view(3, 17) * 7 + 1) % head.num_ids
        position_T, cache = torch.arange(18, device=device), KvCache(layers, 2**20)
        cache.copies, cache.view = torch.arange(3, device=device), 17

        def mask(query: Tensor, keys: int) -> Any:
            return attention_masks.for_model(head.config, position_T[:keys] <= query, query, position_T[:keys])

        def without() -> Tensor:
            return head.hidden(ids_ST[:, :1], ends_S[:, None], self._mask, cache, ends=ends_S + 1)

        try:
            prompt_ST = position_T[None, :17].expand_as(ids_ST)
            head.hidden(ids_ST, prompt_ST, mask(position_T[None, None, :17, None], 17), cache)
            cache.num_rows, cache.copies, cache.positions, cache.view = 3, None, ends_S, 18
            with_S1H = head.hidden(ids_ST[:, :1], ends_S[:, None], mask(ends_S[:, None, None, None], 18), cache)
            found_S1H = without()
            self.why_masked = _why_far(found_S1H, with_S1H, "steps without masks")
            if not self.why_masked and not self._why_no_graph:
                self._why_no_graph = _tried(without, found_S1H, with_S1H)
        except Exception as error:  # noqa: BLE001 - a kernel is compiled and run; the plain way is there for all else
            self.why_masked = _first_line(error)


def logits_with_masks(head: Head, cache: KvCache, state: RowState, rows: int, longest: int) -> Tensor:
    """Return the logits of a step with masks, which every attention can take. `longest`: the length of the longest."""
    last_S, position_S, shift_S = state.last_S[:rows], state.position_S[:rows], state.shift_S[:rows]
    cache.num_rows, cache.copies, cache.positions = len(last_S), None, position_S
    cache.view = min(-(-longest // 16) * 16, cache.length_held)
    key_T, query_S111 = torch.arange(cache.view, device=last_S.device), position_S[:, None, None, None]
    mask = attention_masks.for_model(head.config, key_T <= query_S111, query_S111, key_T)
    return head.logits(head.hidden(last_S[:, None], (position_S + shift_S)[:, None], mask, cache)[:, 0])


def _tried(launch: Callable[[], Tensor], into: Tensor, expected: Tensor) -> str:
    """Return why a graph of `launch` cannot be used; empty if it can."""
    try:
        graph = record_graph(lambda: into.copy_(launch()), into.device)
        into.zero_()
        graph.replay()
    except RuntimeError as error:
        return _first_line(error)
    return _why_far(into, expected, "recorded steps")


def _why_far(found: Tensor, expected: Tensor, what: str) -> str:
    off = float((found.float() - expected.float()).norm() / expected.float().norm())
    return "" if off < _NEAR else f"{what} give another result than with masks ({off:.3f} of the norm)"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
