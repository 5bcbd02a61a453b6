"""The embedded engine's kv cache: one row per sequence, rows of different lengths, live rows first.

Shapes: S rows, H heads, L positions, D head size.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from tandem.ops.byte_sizes import cache_held


class KvCacheLayer(CacheLayerMixin):
    """One layer. In prefill, new rows attend to themselves alone; in decode, each row gets one position."""

    def __init__(self, cache: KvCache) -> None:
        super().__init__()
        self._owner = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, length = self._owner.rows_held, self._owner.length_held
        self.keys = key_states.new_zeros(rows, key_states.shape[1], length, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], length, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, keys, values = self._owner, self.keys, self.values
        assert keys is not None
        assert values is not None
        if cache.copies is not None:
            length = key_states.shape[2]
            keys[cache.targets, :, :length] = key_states[cache.copies]
            values[cache.targets, :, :length] = value_states[cache.copies]
            return key_states, value_states
        rows = cache.num_rows
        index = torch.arange(rows, device=keys.device)
        keys[index, :, cache.positions] = key_states[:, :, 0]
        values[index, :, cache.positions] = value_states[:, :, 0]
        return keys[:rows, :, : cache.view], values[:rows, :, : cache.view]

    def states(self) -> list[Tensor]:
        return []

    def resize(self, rows: int, length: int, live_rows: int) -> None:
        if self.keys is None or self.values is None:
            return
        old_length = self.keys.shape[2]
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(rows, old.shape[1], length, old.shape[3])
            kept = min(length, old_length)
            new[:live_rows, :, :kept] = old[:live_rows, :, :kept]
            setattr(self, name, new)

    def move(self, source: Tensor, target: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys[target] = self.keys[source]
            self.values[target] = self.values[source]

    def clear(self, row: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys[row], self.values[row] = 0.0, 0.0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.view, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class KvCache(Cache):
    """The cache. It doubles when it grows, up to `max_positions` (rows times length), then grows to the exact size.
    `kind`: the class of its layers. `max_rows`: the most rows it will ever hold."""

    def __init__(
        self,
        num_layers: int,
        max_positions: int,
        kind: type[KvCacheLayer] = KvCacheLayer,
        *,
        max_rows: int = sys.maxsize,
    ) -> None:
        self._max_positions, self._max_rows = max_positions, max_rows
        self.rows_held, self.length_held = min(8, max_rows), 64
        self.moved = 0
        """How often its memory was replaced."""
        self.num_rows = 0
        self.view = 0
        self.positions: Tensor = torch.zeros(0, dtype=torch.long)
        self.copies: Tensor | None = None
        """In prefill: the number of each new row's prompt."""
        self.targets: slice | Tensor = slice(0)
        """In prefill: the new rows. A graph finds them in a tensor."""
        self.own_PT: Tensor | None = None
        """In prefill, where prompts are padded on the left: the index of each of their positions in the padded row."""
        super().__init__(layers=[kind(self) for _ in range(num_layers)])

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` live rows of `length` positions."""
        if rows <= self.rows_held and length <= self.length_held:
            return
        # From the needed size, not the current one: many short rows and then one long row do not need many long rows.
        self.rows_held, self.length_held = cache_held(rows, length, self._max_positions)
        self.rows_held = min(self.rows_held, self._max_rows)
        self.moved += 1
        for layer in self.layers:
            layer.resize(self.rows_held, self.length_held, self.num_rows)  # pyright: ignore[reportAttributeAccessIssue]

    def states(self) -> list[Tensor]:
        """Return what a step changes that another one, from the same positions, would not find as it was."""
        return [each for layer in self.layers for each in layer.states()]  # pyright: ignore[reportAttributeAccessIssue]

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Forget a row that is not finite: the next one in its place would read it with weight 0, and 0 times infinity
        is not 0."""
        for layer in self.layers:
            layer.clear(row)  # pyright: ignore[reportAttributeAccessIssue]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Move rows into the gaps that ended rows left. Both are on the device, so that no layer copies them there."""
        for layer in self.layers:
            layer.move(source, target)  # pyright: ignore[reportAttributeAccessIssue]
