"""The prefill of one prompt as a CUDA graph, so that the first token of a request that comes alone is one launch.

A prompt is filled up on its right to one of a few widths. No real token attends to the padding, and decoding overwrites
its positions before it reads them. A hybrid's is filled up on its left, under a mask. The row, the length and the ids
are read from one tensor that stays.

Shapes: V vocabulary, T positions, W the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.engine.hf.admission_queue import QueuedRequest
from tandem.engine.hf.cache_room import CacheRoom
from tandem.engine.hf.graphs_by_kind import GraphsByKind, PassKind, first_line
from tandem.engine.hf.kv_cache import KvCache
from tandem.engine.hf.prefill_batch import hidden_of_ends
from tandem.engine.hf.row_state import RowState
from tandem.ops import attention_masks, option_report
from tandem.ops.lm_head import Head

WIDTHS = (16, 32, 64, 128, 256)
"""A wider prompt keeps a GPU busy while it is launched kernel by kernel."""
_TOLD = 3  # numbers before the ids: the row, the length, and 0 for the shift of the rotary embedding


class PromptGraphs:
    def __init__(
        self, head: Head, cache: KvCache, state: RowState, room: CacheRoom, *, layers: int, most_positions: int
    ) -> None:
        """`room`: of the cache. `most_positions`: that the model has numbers for, padding included."""
        self._head, self._cache, self._state, self._most = head, cache, state, most_positions
        device = state.last_S.device
        self._told = torch.zeros(_TOLD + WIDTHS[-1], dtype=torch.long, device=device)
        self._copies_1 = torch.zeros(1, dtype=torch.long, device=device)
        self.graphs = GraphsByKind("prefills of one prompt", cache, device, most_rows=1)
        self._end_together = room.has_states
        self.graphs.why_not = self.graphs.why_not or room.why_apart
        if not self.graphs.why_not:
            self._try(room.cache(layers))

    @property
    def report(self) -> dict[str, Any]:
        return option_report.requested("graphs", self.graphs.why_not)

    def width_for(self, wave: Sequence[QueuedRequest]) -> int:
        """Return how wide the one prompt of a wave is run here; 0: the wave is not."""
        if self.graphs.why_not or len(wave) > 1 or wave[0].sampling.images:
            return 0
        length = wave[0].length
        return next((width for width in WIDTHS if length <= width <= self._most), 0)

    def run(self, row: int, request: QueuedRequest, width: int, *, adapters: int, by_launches: bool) -> Tensor:
        """Put a request into a row of the cache and of the state. Return the logits after its prompt, [1, V]; valid
        until the next call. `adapters`, `by_launches`: as of a decode step."""
        self._tell(row, [*request.prompt, *request.ids], width)
        launch = partial(self._launched, width, self._cache)
        logits_1V = self.graphs.run(PassKind(width, adapters), launch, by_launches=by_launches)
        self._state.begin(row, [request], self._told[1:2], self._told[2:3])
        return logits_1V

    def _tell(self, row: int, ids: list[int], width: int) -> None:
        padding = [0] * (width - len(ids))
        told = torch.tensor([row, len(ids), 0, *([*padding, *ids] if self._end_together else [*ids, *padding])])
        self._told[: len(told)].copy_(told)

    def _launched(self, width: int, cache: KvCache) -> Tensor:
        row_1, length_1, ids_1W = self._told[:1], self._told[1:2], self._told[None, _TOLD : _TOLD + width]
        cache.targets, cache.copies, cache.view = row_1, self._copies_1, width
        if self._end_together:
            return self._head.logits(hidden_of_ends(self._head, cache, ids_1W, length_1))
        positions_W = torch.arange(width, device=ids_1W.device)
        mask = attention_masks.of_prompts(self._head.config, positions_W)
        hidden_1WH = self._head.hidden(ids_1W, positions_W[None], mask, cache)
        return self._head.logits(hidden_1WH[0].index_select(0, length_1 - 1))

    @torch.no_grad()
    def _try(self, cache: KvCache) -> None:
        """Compare a prompt that is a graph with one that is launched, without padding."""
        head, width, length = self._head, WIDTHS[0], WIDTHS[0] - 3
        ids = [(7 * place + 1) % head.num_ids for place in range(length)]
        self._tell(0, ids, width)
        try:
            positions_T = torch.arange(length, device=self._told.device)
            mask = attention_masks.of_prompts(head.config, positions_T)
            first = _TOLD + self._end_together * (width - length)
            hidden_1TH = head.hidden(self._told[None, first : first + length], positions_T[None], mask)
            found_1V = self._launched(width, cache)
            self.graphs.try_out(partial(self._launched, width, cache), found_1V, head.logits(hidden_1TH[0, -1:]))
        except Exception as error:  # noqa: BLE001 - the plain way is there for what a model's code may raise
            self.graphs.why_not = first_line(error)
