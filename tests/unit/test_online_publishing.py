"""What the trainer process may ask the engine for while it publishes, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tandem.engine.null import NullEngine
from tandem.online.publishing import EngineProxy, Publishing
from tandem.types import Completion, Sampling, Span


class Engine(NullEngine):
    asked: Sampling | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **_: Any) -> Completion:
        self.asked = sampling
        return Completion([7, 8], [-0.5, -0.25], [Span(3, 2)], "length")


def test_a_canary_is_urgent_among_those_who_are_being_answered():
    engine: Any = Engine()
    publishing = Publishing(engine, lambda link: engine, lambda: 3)
    across = EngineProxy(publishing.handle, receivers=1)
    with publishing.under_way():
        answer = asyncio.run(across.generate([1, 2], Sampling(max_tokens=2, temperature=0.0, urgent=True)))
    assert answer == Completion([7, 8], [-0.5, -0.25], [Span(3, 2)], "length")
    assert engine.asked == Sampling(max_tokens=2, temperature=0.0, urgent=True)
