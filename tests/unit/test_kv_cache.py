"""The KV cache holds what is live, within its budget."""

from __future__ import annotations

import torch

from tandem.engine.hf.kv_cache import KvCache

BUDGET = 4096


def fill(cache: KvCache, rows: int, length: int) -> None:
    cache.num_rows = 0
    cache.reserve(rows, length)
    cache.targets, cache.copies, cache.view = slice(rows), torch.zeros(rows, dtype=torch.long), length
    states = torch.arange(length, dtype=torch.float32).view(1, 1, length, 1).expand(1, 2, length, 4)
    for layer in range(len(cache.layers)):
        cache.update(states, states, layer)
    cache.num_rows = rows


def positions_held(cache: KvCache) -> int:
    keys = cache.layers[0].keys
    assert keys is not None
    return keys.shape[0] * keys.shape[2]


def test_many_short_rows_and_then_one_long_one_do_not_make_many_long_ones():
    cache = KvCache(2, BUDGET)
    fill(cache, 64, 32)
    fill(cache, 1, 4000)
    assert positions_held(cache) <= BUDGET


def test_doubling_stops_where_the_budget_does():
    cache = KvCache(1, BUDGET)
    fill(cache, 33, 100)  # doubled: 64 x 128, twice the budget
    assert positions_held(cache) == 33 * 124  # of the next multiple of 64, 128, what the budget allows


def test_growing_keeps_what_live_rows_hold():
    cache = KvCache(1, BUDGET)
    fill(cache, 3, 60)
    cache.reserve(5, 200)
    keys = cache.layers[0].keys
    assert keys is not None
    assert torch.equal(keys[2, 0, :60, 0], torch.arange(60.0))
