"""Where requests to vLLM wait, and how it is brought to a halt.

consumes: requests                      waits for: the gate to be opened again
produces: a vLLM that computes nothing  waits for: what was let in, to end, to be ended and asked again, or to be held

All requests come through here. So behind a gate that is shut, once those that were let in have ended, vLLM is idle, and
need not be paused itself: that takes it 20 ms. What is held keeps its place in vLLM and the tokens that it has, and
loses its keys and values: they are recomputed when it goes on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from tandem.engine.vllm.process import CONTROL_S, VllmProcess
from tandem.errors import EngineError, SyncTimeout
from tandem.types import OnUpdate

_ABORT_AGAIN_S = 0.1


class RequestGate:
    def __init__(self, process: VllmProcess, on_update: OnUpdate) -> None:
        """`on_update`: what becomes of requests under way when it shuts. They are waited for (finish), ended to be
        asked again (restart), or held (continue)."""
        self.on_update: OnUpdate = on_update
        self._process = process
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._vllm_paused = False
        self._running: Counter[str] = Counter()
        self._may_be_held = 0
        """Of those that run."""

    async def opened(self) -> None:
        while not self._is_open.is_set():  # it may have shut again since who waits was told
            await self._is_open.wait()

    @contextmanager
    def running(self, model: str, *, may_be_held: bool) -> Iterator[None]:
        """A request that was let in, for the model that it names."""
        self._running[model] += 1
        self._may_be_held += may_be_held
        try:
            yield
        finally:
            self._running[model] -= 1
            self._may_be_held -= may_be_held

    def is_asked(self, model: str) -> bool:
        return bool(self._running[model])

    async def shut(self, deadline_s: float, *, holds: bool = True) -> None:
        """Afterwards no step is computed, and what has not ended has no keys and values. Again: what has come since is
        brought to a halt as well. `holds`: whom it may hold; else they are waited for, too."""
        self._is_open.clear()
        try:
            async with asyncio.timeout(deadline_s):
                match self.on_update:
                    case "finish":
                        await self._until_none_runs()
                    case "restart":
                        await self._end_all()
                    case "continue":
                        await self._until_none_runs(but_held=holds)
        except TimeoutError as error:
            raise SyncTimeout(f"engine: what it was asked did not end within {deadline_s:g} s") from error
        if self._running.total():
            await self._pause("keep")

    async def _end_all(self) -> None:
        """As often as more has come: a request that reaches a vLLM which is paused waits there for the end of the
        pause."""
        while self._running.total():
            await self._pause("abort")
            with suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_AGAIN_S):
                    await self._until_none_runs()

    async def _pause(self, mode: Literal["abort", "keep"]) -> None:
        self._vllm_paused = True  # whatever is heard of it
        await self._process.post("/pause", deadline_s=CONTROL_S, mode=mode, clear_cache="true")

    async def open(self) -> None:
        if self._vllm_paused:
            await self._process.post("/resume", deadline_s=CONTROL_S)
            self._vllm_paused = False
        self._is_open.set()

    async def give_up(self) -> None:
        """End the wait of all held requests with an error."""
        self._is_open.set()
        try:
            async with asyncio.timeout(CONTROL_S):
                await self._end_all()
        except (EngineError, TimeoutError):
            await self._process.end()  # else they would go on there, whatever it computes with

    async def _until_none_runs(self, *, but_held: bool = False) -> None:
        while self._running.total() > (self._may_be_held if but_held else 0):
            await asyncio.sleep(0.001)
