"""How large the embedded engine's cache may become, and whether a hybrid's states can be kept in it.

Shapes: S rows, T positions, H hidden.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.engine.hf.graphs_by_kind import first_line
from tandem.engine.hf.kv_cache import KvCache
from tandem.engine.hf.prefill_batch import hidden_of_ends
from tandem.engine.hf.recurrent_cache import RecurrentCacheLayer
from tandem.errors import SpecError
from tandem.ops import attention_masks, option_report, recurrent_layers
from tandem.ops.byte_sizes import position_bytes
from tandem.ops.lm_head import Head

_log = logging.getLogger(__name__)
_NEAR_EXACT, _NEAR = 1e-3, 0.1
"""Largest difference of a step from a whole pass, of its norm: in float32, and in 16 bits."""


class CacheRoom(NamedTuple):
    """How large the cache of an engine may become."""

    positions: int
    """Of keys and values, over all rows."""
    max_running: int
    """Requests at once; there is one row more, for an urgent one."""
    asked: int
    """Requests at once that were asked for."""
    has_states: bool
    why_apart: str = ""
    """Of a hybrid: why prompts of different lengths are computed one length after the other. Empty: together."""

    @property
    def report(self) -> dict[str, Any]:
        """Of a hybrid: whether prompts are computed together; and why fewer requests run at once than were asked for,
        if that is so."""
        told = {"lengths": option_report.requested("together", self.why_apart)} if self.has_states else {}
        if self.max_running == self.asked:
            return told
        why = f"{self.max_running}: states of more rows do not fit into half of engine.kv_gib"
        return {**told, "rows": option_report.requested(f"{self.asked}", why)}

    def cache(self, num_layers: int) -> KvCache:
        if not self.has_states:
            return KvCache(num_layers, self.positions)
        return KvCache(num_layers, self.positions, RecurrentCacheLayer, max_rows=self.max_running + 1)


def cache_room(head: Head, kv_gib: float, max_running: int, like: Tensor) -> CacheRoom:
    """Divide the memory of an engine's cache: the states of rows take half of it at most. `like`: a tensor with the
    type and the device of keys and values."""
    config = head.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers, room_bytes = config.num_hidden_layers, kv_gib * 2**30
    if not attention_masks.num_recurrent(config):
        of_a_position = position_bytes(layers, heads, head_dim, like.element_size())
        return CacheRoom(int(room_bytes / of_a_position), max_running, max_running, False)
    row_bytes, why_apart = try_states(head, layers, like)
    rows = int(room_bytes / 2 / row_bytes)
    if rows < 2:
        raise SpecError(
            f"engine.kv_gib = {kv_gib:g}: the recurrent layers' states of one sequence take {row_bytes / 2**20:.1f} "
            "MiB, and half of it holds fewer than two; raise it"
        )
    if rows <= max_running:
        _log.warning("%d requests at once, not %d: their states fill half of engine.kv_gib", rows - 1, max_running)
    rows = min(max_running + 1, rows)
    attends = sum(kind in attention_masks.ATTENDING for kind in config.layer_types)
    of_a_position = position_bytes(attends, heads, head_dim, like.element_size())
    return CacheRoom(int((room_bytes - rows * row_bytes) / of_a_position), rows - 1, max_running, True, why_apart)


@torch.no_grad()
def try_states(head: Head, layers: int, like: Tensor) -> tuple[int, str]:
    """Return the bytes of one row's states, and why prompts of different lengths cannot be computed together. Compare
    prompts and a step after each with whole passes: together, padded on the left, and if that fails each alone."""
    trial = partial(_why_not, head, layers, like)
    cache, why_apart = trial(together=True)
    if why_apart:
        cache, why = trial(together=False)
        if why:
            raise SpecError(
                f"model: {head.config.get_text_config().model_type} has recurrent layers that the embedded engine "
                f"cannot compute step by step: {why}; {attention_masks.WAY_OUT}"
            )
    return sum(layer.state_bytes() for layer in cache.layers if isinstance(layer, RecurrentCacheLayer)), why_apart


def _why_not(head: Head, layers: int, like: Tensor, *, together: bool) -> tuple[KvCache, str]:
    config, device, ends = head.config, like.device, (8, 5, 3)
    cache = KvCache(layers, 2**16, RecurrentCacheLayer, max_rows=3)
    ids_3T = (torch.arange(3 * 9, device=device).view(3, 9) * 7 + 1) % head.num_ids
    positions_T = torch.arange(9, device=device)
    rows_3, ends_3 = positions_T[:3], torch.tensor(ends, device=device)
    try:
        if together and (why := recurrent_layers.why_padding_enters(head.body, like)):
            return cache, why
        whole_3TH = head.hidden(ids_3T, positions_T.expand(3, -1), attention_masks.of_prompts(config, positions_T))
        if together:
            cache.targets, cache.copies, cache.view = slice(3), rows_3, 8
            padded_3T = (positions_T[:8] + ends_3[:, None]) % 8
            hidden_of_ends(head, cache, ids_3T[:, :8].gather(1, padded_3T), ends_3)
        else:
            for number, length in enumerate(ends):
                cache.targets, cache.copies, cache.view = slice(number, number + 1), rows_3[:1], length
                before_T = positions_T[:length]
                mask = attention_masks.of_prompts(config, before_T)
                head.hidden(ids_3T[number : number + 1, :length], before_T[None], mask, cache)
        cache.num_rows, cache.copies, cache.positions, cache.view = 3, None, ends_3, 9
        query_3111 = ends_3[:, None, None, None]
        mask = attention_masks.for_model(config, positions_T <= query_3111, query_3111, positions_T)
        found_31H = head.hidden(ids_3T[rows_3, ends_3][:, None], ends_3[:, None], mask, cache)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's own code runs here
        return cache, first_line(error)
    if not cache.states():
        return cache, "they leave no state"
    found_3H, expected_3H = found_31H[:, 0].float(), whole_3TH[rows_3, ends_3].float()
    padded = slice(1, None) if together else slice(None)
    return cache, _why_far(found_3H[padded], expected_3H[padded], exact=like.dtype == torch.float32)


def _why_far(found_SH: Tensor, expected_SH: Tensor, *, exact: bool) -> str:
    """In 16 bits the nearest row decides: rounding may send a token of another one to another expert. What is not
    finite is refused when it answers a request."""
    off_S = (found_SH - expected_SH).norm(dim=1) / expected_SH.norm(dim=1).clamp_min(1e-12)
    off, most = (float(off_S.max()), _NEAR_EXACT) if exact else (float(off_S.min()), _NEAR)
    return f"steps give another result than the whole text ({off:.3f} of the norm)" if off > most else ""
