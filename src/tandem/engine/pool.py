"""Several engines that are one Engine: requests go to the least busy, versions to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tandem.errors import SyncError
from tandem.protocols import Engine, OnToken, WeightSource
from tandem.types import Completion, Proof, Sampling, Weights


class EnginePool:
    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._busy = [0] * len(self._engines)

    @property
    def version(self) -> int:
        """The oldest that any of them serves."""
        return min(engine.version for engine in self._engines)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        index = min(range(len(self._engines)), key=self._busy.__getitem__)
        self._busy[index] += 1
        try:
            return await self._engines[index].generate(prompt_ids, sampling, session=session, on_token=on_token)
        finally:
            self._busy[index] -= 1

    async def attach(self, source: WeightSource) -> None:
        for rank, engine in enumerate(self._engines):
            await engine.attach(_Rank(source, rank))

    async def load(self, version: int) -> Proof:
        loads = await asyncio.gather(*(engine.load(version) for engine in self._engines), return_exceptions=True)
        proofs = [load for load in loads if isinstance(load, Proof)]
        if failed := [load for load in loads if isinstance(load, BaseException)]:
            raise failed[0]  # not sooner: an engine that still waits would take what is sent next
        if any(proof.version != version for proof in proofs):
            raise SyncError(f"pool: asked for version {version}, engines hold {[proof.version for proof in proofs]}")
        return Proof(
            version,
            proofs[0].mode,
            proofs[0].verified,
            sum(proof.tensors for proof in proofs),
            sum(proof.bytes_moved for proof in proofs),
            max(proof.seconds for proof in proofs),
            tuple(name for proof in proofs for name in proof.engines),
        )

    async def sleep(self) -> None:
        await asyncio.gather(*(engine.sleep() for engine in self._engines))

    async def wake(self) -> None:
        await asyncio.gather(*(engine.wake() for engine in self._engines))

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))


class _Rank:
    """One engine's share of a source that expects several receivers."""

    def __init__(self, source: WeightSource, rank: int) -> None:
        self._source, self._rank = source, rank

    def receive(self, version: int, rank: int = 0) -> Weights:
        return self._source.receive(version, self._rank)
