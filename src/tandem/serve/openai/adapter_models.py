"""Adapters of one base as models of their own: each has a name, and the version of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tandem.protocols import OnToken
from tandem.types import Completion, Sampling, Span


class AdapterEngine(Protocol):
    """An engine that serves several adapters in one batch."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
        adapter: str = "",
    ) -> Completion: ...


@dataclass(frozen=True)
class AdapterModel:
    """One adapter: what samples for its name."""

    engine: AdapterEngine
    adapter: str
    version: int

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        def told(token_id: int, logprob: float, _base: int, *ranked: Any) -> None:
            assert on_token is not None
            on_token(token_id, logprob, self.version, *ranked)

        completion = await self.engine.generate(
            prompt_ids, sampling, session=session, on_token=told if on_token else None, adapter=self.adapter
        )
        return replace(completion, spans=[Span(self.version, len(completion.ids))] if completion.ids else [])

    async def close(self) -> None:
        """The engine is closed with its base."""
