"""The layers of a hybrid's cache: recurrent ones have a state for each row, in place of keys and values or beside them.

A state holds all of a row so far. So a prompt must end where its row ends: prompts of a prefill that differ in length
are padded on the left, or computed one length after the other.

Shapes: S rows, P prompts, T positions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from tandem.engine.hf.kv_cache import KvCache, KvCacheLayer

_CONV, _RECURRENT = "conv", "recurrent"


class RecurrentCacheLayer(  # pyright: ignore[reportIncompatibleMethodOverride]
    KvCacheLayer, LinearAttentionCacheLayerMixin
):
    """One layer. A prefill begins without a state; a decode step reads and writes those of the live rows, which are
    views: some of transformers' layers change them in place."""

    number_of_states, record_past = 1, False

    def __init__(self, cache: KvCache) -> None:
        super().__init__(cache)
        self._states: dict[str, Tensor] = {}

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return {0: self._owner.copies is None}

    @property
    def conv_states(self) -> dict[int, Tensor | None]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {0: self._live(_CONV)}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {0: self._live(_RECURRENT)}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        own_PT = self._owner.own_PT
        if own_PT is None:
            return super().update(key_states, value_states)
        place = own_PT[:, None, :, None]
        super().update(*(each.gather(2, place.expand_as(each)) for each in (key_states, value_states)))
        return key_states, value_states

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Take what the last positions of prompts leave. Return all positions, as many as a kernel has at least."""
        width = conv_kernel_size or conv_states.shape[-1]
        padded = functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._put(_CONV, padded[..., -width:])
        return padded

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        return self._put(_RECURRENT, recurrent_states)

    def states(self) -> list[Tensor]:
        return list(self._states.values())

    def state_bytes(self) -> int:
        """Of one row."""
        return sum(memory[0].numel() * memory.element_size() for memory in self._states.values())

    def resize(self, rows: int, length: int, live_rows: int) -> None:
        super().resize(rows, length, live_rows)
        for name, old in self._states.items():
            new = self._states[name] = old.new_zeros(rows, *old.shape[1:])
            new[:live_rows] = old[:live_rows]

    def move(self, source: Tensor, target: Tensor) -> None:
        super().move(source, target)
        for memory in self._states.values():
            memory[target] = memory[source]

    def clear(self, row: int) -> None:
        super().clear(row)
        for memory in self._states.values():
            memory[row] = 0.0

    def _live(self, name: str) -> Tensor | None:
        memory = self._states.get(name)
        return None if memory is None else memory[: self._owner.num_rows]

    def _put(self, name: str, states: Tensor) -> Tensor:
        cache = self._owner
        if cache.copies is None:
            live = self._live(name)
            assert live is not None, "a decode step before a prefill"
            return live.copy_(states)
        if name not in self._states:
            self._states[name] = states.new_zeros(cache.rows_held, *states.shape[1:])
        self._states[name][cache.targets] = states[cache.copies]
        return states
