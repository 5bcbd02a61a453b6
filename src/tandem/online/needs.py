"""What the conductor needs of others: an engine of this process, its end of a bridge, and a memory of samples."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tandem.online.jobs import Job
from tandem.online.wire import Sequence1
from tandem.protocols import Engine, WeightSource
from tandem.types import Sampling

_DRAWN_TOKENS = 16


class EngineEnd(WeightSource, Protocol):
    @property
    def reply(self) -> Mapping[str, Any]: ...


class Memory(Protocol):
    """Earlier samples: see online/replay.py."""

    def remember(self, job: Job, groups: Sequence[Sequence[Sequence1]]) -> None: ...
    def draw(self, job: Job, groups: Sequence[Sequence[Sequence1]]) -> tuple[list[list[Sequence1]], int]: ...


async def drawn_from(
    engine: Engine, groups: Sequence[Sequence[Sequence1]], most: int, context: int
) -> list[tuple[list[int], list[int]]]:
    """What the version that is served says to at most so many of a job's prompts: there the KL gate looks."""
    prompts = [each.ids[: each.first] for group in groups for each in group[:1]][:most]
    room = [min(_DRAWN_TOKENS, context - len(prompt)) for prompt in prompts]
    sampling = [Sampling(max_tokens=tokens, temperature=1.0, seed=n) for n, tokens in enumerate(room)]
    asked = (engine.generate(prompt, each) for prompt, each in zip(prompts, sampling, strict=True))
    return [(prompt, answer.ids) for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True)]
