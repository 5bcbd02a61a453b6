"""null: an engine for stages that train on recordings; it refuses to sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tandem.errors import EngineError
from tandem.protocols import OnToken, WeightSource
from tandem.types import Completion, Sampling, Served


class NullEngine:
    version = -1
    receivers = 1

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        raise EngineError("engine: this stage trains on recordings and has no engine")

    async def attach(self, source: WeightSource) -> None:
        pass

    async def load(self, version: int) -> Served:
        self.version = version
        return Served(version, {})

    async def sleep(self) -> None:
        pass

    async def wake(self) -> None:
        pass

    async def lost(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass
