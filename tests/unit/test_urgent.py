"""Who is urgent goes first through the embedded engine. What that is for: tests/conformance/test_engine_urgent.py."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import votes
from tandem.engine.hf import EmbeddedEngine
from tandem.types import Sampling


@pytest.mark.parametrize(("max_running", "positions"), [(1, 10**6), (8, 39), (8, 10**6)])
def test_nobody_else_who_waits_is_let_in_before_it_has_ended(max_running: int, positions: int):
    """One runs: it has the only place, or all the room there is for keys and values, or some are left."""
    order: list[str] = []

    async def work() -> None:
        engine = EmbeddedEngine(
            votes.make(), num_ids=256, end_ids=frozenset(), decode=lambda ids: "", max_running=max_running
        )
        engine.version, engine._kv_positions = 0, positions

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
    assert "first" in order[ended:]
