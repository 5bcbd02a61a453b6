"""Urgent requests go first through the embedded engine; tests/conformance/test_engine_urgent.py says what for."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import voting_model as votes
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.ops import byte_sizes
from tandem.types import Sampling


def engine_of(max_running: int, kv_gib: float = 4.0) -> EmbeddedEngine:
    engine = EmbeddedEngine(
        votes.make(), num_ids=256, end_ids=frozenset(), decode=lambda ids: "", max_running=max_running, kv_gib=kv_gib
    )
    engine.version = 0
    return engine


@pytest.mark.parametrize("max_running", [1, 8])
@pytest.mark.parametrize("room_for", [1, 2, 1000])
def test_nobody_else_who_waits_is_let_in_before_it_has_ended(max_running: int, room_for: int):
    """One runs, and may have the only place, or all the room that there is for keys and values: that alone it waits
    for."""
    order: list[str] = []

    async def work() -> None:
        config = votes.make().config
        head_dim = config.hidden_size // config.num_attention_heads
        of_one = byte_sizes.position_bytes(config.num_hidden_layers, config.num_key_value_heads, head_dim, 4)
        engine = engine_of(max_running, (room_for * 39 + 0.5) * of_one / 2**30)

        async def ask(name: str, tokens: int, *, urgent: bool = False) -> None:
            sampling = Sampling(max_tokens=tokens, urgent=urgent)
            await engine.generate([5] * 9, sampling, on_token=lambda *_: order.append(name))

        begun = asyncio.create_task(ask("first", 30))
        while not order:
            await asyncio.sleep(0)
        tasks = [asyncio.create_task(ask("other", 2)) for _ in range(3)]
        tasks.append(asyncio.create_task(ask("urgent", 2, urgent=True)))
        await asyncio.gather(begun, *tasks)
        await engine.close()

    asyncio.run(work())
    assert Counter(order) == {"first": 30, "other": 6, "urgent": 2}
    ended = len(order) - order[::-1].index("urgent")
    assert "other" not in order[:ended]
    assert ("first" in order[ended:]) == (room_for > 1)


def test_the_cache_does_not_grow_for_it():
    """Beside as many as may run."""

    async def work() -> None:
        engine = engine_of(16)
        told: list[int] = []
        others = [
            asyncio.create_task(engine.generate([5] * 9, Sampling(max_tokens=30), on_token=lambda *_: told.append(1)))
            for _ in range(16)
        ]
        while len(told) < 16:
            await asyncio.sleep(0)
        held = engine.passes.cache.rows_held
        assert len((await engine.generate([5] * 9, Sampling(max_tokens=3, urgent=True))).ids) == 3
        assert not any(each.done() for each in others)
        assert engine.passes.cache.rows_held == held
        await asyncio.gather(*others)
        await engine.close()

    asyncio.run(work())
