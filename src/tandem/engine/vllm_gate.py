"""Where requests to vLLM wait, and how it is emptied of them.

consumes: requests                      waits for: the gate to be opened again
produces: a vLLM in which nothing runs  waits for: what was let in, to end by itself or to be ended and asked again

All requests come through here. So behind a gate that is shut, once those that were let in have ended, vLLM is idle, and
need not be paused itself: that takes it 20 ms.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tandem.engine.vllm_process import CONTROL_S, VllmProcess
from tandem.errors import SyncTimeout

_ABORT_AGAIN_S = 0.1


class Gate:
    def __init__(self, process: VllmProcess, *, restarts: bool) -> None:
        """`restarts`: requests under way are ended, to be asked again, and not waited for."""
        self.restarts = restarts
        self._process = process
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._vllm_paused = False
        self._running: Counter[str] = Counter()

    async def opened(self) -> None:
        while not self._is_open.is_set():  # it may have shut again since who waits was told
            await self._is_open.wait()

    @contextmanager
    def running(self, model: str) -> Iterator[None]:
        """A request that was let in, for the model that it names."""
        self._running[model] += 1
        try:
            yield
        finally:
            self._running[model] -= 1

    def is_asked(self, model: str) -> bool:
        return bool(self._running[model])

    async def shut(self, deadline_s: float) -> None:
        """Afterwards nothing runs, and nothing waits inside vLLM. What is to be asked again is ended as often as more
        of it has come: a request that reaches a vLLM which is paused waits there for the end of the pause."""
        self._is_open.clear()
        try:
            async with asyncio.timeout(deadline_s):
                if not self.restarts:
                    await self._none_runs()
                while self._running.total():
                    self._vllm_paused = True  # whatever is heard of it
                    await self._process.post("/pause", deadline_s=deadline_s, mode="abort", clear_cache="true")
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_ABORT_AGAIN_S):
                            await self._none_runs()
        except TimeoutError as error:
            raise SyncTimeout(f"engine: what it was asked did not end within {deadline_s:g} s") from error

    async def open(self) -> None:
        if self._vllm_paused:
            await self._process.post("/resume", deadline_s=CONTROL_S)
            self._vllm_paused = False
        self._is_open.set()

    def give_up(self) -> None:
        """Whoever waits goes on to an error, and does not wait for ever; vLLM is left as it is."""
        self._is_open.set()

    async def _none_runs(self) -> None:
        while self._running.total():
            await asyncio.sleep(0.001)
