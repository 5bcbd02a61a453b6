"""The engine as far as the trainer process may ask for it: while a version is published, and that version alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tandem.errors import NotKnown, SyncError
from tandem.io.engine_messages import served_as_json
from tandem.online.messages import Asked, Attach, CanarySample, Load
from tandem.online.orchestrator_needs import OrchestratorBridge
from tandem.protocols import DigestedEngine
from tandem.types import Sampling


class Publishing:
    def __init__(
        self,
        engine: DigestedEngine,
        open_source: Callable[[Mapping[str, Any]], OrchestratorBridge],
        active: Callable[[], int],
    ) -> None:
        """`active`: the version that was committed last."""
        self._engine, self._open_source, self._active = engine, open_source, active
        self._source: OrchestratorBridge | None = None
        self._under_way = False

    @contextmanager
    def under_way(self) -> Iterator[None]:
        self._under_way = True
        try:
            yield
        finally:
            self._under_way = False

    async def handle(self, what: Asked) -> dict[str, Any]:
        if not self._under_way:
            raise SyncError("online: nothing is being published: the engine's weights are not the trainer's to change")
        match what:
            case Attach(link=link):
                return await self._attach(link)
            case Load(version=version):
                if version != self._active():
                    raise SyncError(f"online: version {version} was not committed")
                return served_as_json(await self._engine.load(version))
            case CanarySample(prompt_ids=prompt, max_tokens=most):
                made = await self._engine.generate(prompt, Sampling(max_tokens=most, temperature=0.0, urgent=True))
                return {
                    "ids": made.ids,
                    "logprobs": made.logprobs,
                    "spans": [[span.version, span.count] for span in made.spans],
                    "finish_reason": made.finish_reason,
                }
            case _:
                raise NotKnown(f"online: the server process is not asked for {type(what).__name__}")

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    async def _attach(self, link: Mapping[str, Any]) -> dict[str, Any]:
        source = await asyncio.to_thread(self._open_source, link)
        before, self._source = self._source, source
        try:
            await self._engine.attach(source)
        finally:
            if before is not None:
                before.close()
        return dict(source.reply)
