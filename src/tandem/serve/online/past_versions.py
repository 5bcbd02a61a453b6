"""Serve earlier versions beside the active one: `/versions/{version}/v1/...`."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from tandem.errors import CheckpointError, NotKnown
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.openai.routes import Sampler
from tandem.types import Completion, Sampling

_AT_A_TIME = 2  # each engine holds a copy of all weights
PATIENCE_S, _LOOK_S = 30.0, 0.02
JUST_ASKED_S = 1.0  # a caller that was just given an engine is about to use it


class _Counted:
    """An engine that counts its running requests."""

    def __init__(self, engine: Sampler) -> None:
        self._engine, self._running, self.asked_at = engine, 0, 0.0

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def is_idle(self) -> bool:
        return not self._running and time.monotonic() - self.asked_at > JUST_ASKED_S

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **more: Any) -> Completion:
        self._running += 1
        try:
            return await self._engine.generate(prompt_ids, sampling, **more)
        finally:
            self._running -= 1

    async def close(self) -> None:
        await self._engine.close()


class PastVersions:
    def __init__(self, load: Callable[[int], Sampler] | None) -> None:
        """`load` makes an engine of a version; it may block. None: this server cannot serve earlier versions."""
        self._load, self._turn = load, asyncio.Lock()
        self._engines: OrderedDict[int, _Counted] = OrderedDict()

    async def engine(self, version: int) -> Sampler:
        """Return an engine of this version; the idle one used least recently makes room for it."""
        if self._load is None:
            text = "only the embedded engine with all weights trained holds several versions; activate the version"
            raise RequestRefused(409, text, field="version")
        if version not in self._engines:  # a request for a loaded version does not wait for the lock
            async with self._turn:
                await self._bring(version, self._load)
        self._engines.move_to_end(version)
        self._engines[version].asked_at = time.monotonic()
        return self._engines[version]

    async def _bring(self, version: int, load: Callable[[int], Sampler]) -> None:
        if version in self._engines:  # another request loaded it while this one waited for the lock
            return
        while len(self._engines) >= _AT_A_TIME:
            await self._engines.pop(await self._idle()).close()
        try:
            self._engines[version] = _Counted(await asyncio.to_thread(load, version))
        except CheckpointError as error:
            raise NotKnown(f"version {version} cannot be read: {error}") from error

    async def _idle(self) -> int:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if (idle := next((version for version, each in self._engines.items() if each.is_idle), None)) is not None:
                return idle
            await asyncio.sleep(_LOOK_S)
        text = f"versions {', '.join(map(str, self._engines))} are busy, and at most {_AT_A_TIME} can be loaded"
        raise RequestRefused(429, f"{text}; ask again", field="version")

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()
