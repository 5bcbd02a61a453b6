"""Send requests to vLLM together: those of one moment are one request of HTTP.

consumes: requests of a few tokens or many     waits for: vLLM, of which each answer comes as it ends
produces: their answers

`tandem.vllm_worker.together_route` is the other end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from tandem.engine.vllm.process import CONTROL_S, VllmProcess
from tandem.errors import EngineError
from tandem.io.engine_messages import decoded
from tandem.ops.vllm_token_protocol import ABORTED, TOGETHER

Waiting: TypeAlias = tuple[Mapping[str, Any], asyncio.Future[dict[str, Any]]]

_MOST_TOGETHER, _MOST_IDS = 64, 2**16  # they are written and read in one piece, and all others wait meanwhile


class RequestsTogether:
    def __init__(self, process: VllmProcess) -> None:
        self._process, self._most = process, process.most_requests
        self._waiting: deque[Waiting] = deque()
        self._under_way = 0
        self._dropped: list[str] = []
        self._sending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return vLLM's answer to a request with a `name`. If the caller is cancelled, vLLM aborts it."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        waiting = (request, answer)
        self._waiting.append(waiting)
        self._go_on()
        try:
            return await answer
        except asyncio.CancelledError:
            try:
                self._waiting.remove(waiting)
            except ValueError:
                self._drop(request["name"])
            raise

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._sending] if self._sending else [])]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, answer in self._waiting:
            _fail(answer, EngineError("engine: closed"))
        self._waiting.clear()

    # --- sending

    def _go_on(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(), name="requests to vLLM")

    async def _send(self) -> None:
        for _ in range(2):  # until the other requests of this moment are here
            await asyncio.sleep(0)
        while self._waiting and (room := self._most - self._under_way) > 0:
            together, ids = list[Waiting](), 0
            while self._waiting and len(together) < min(room, _MOST_TOGETHER) and ids < _MOST_IDS:
                together.append(self._waiting.popleft())
                ids += len(together[-1][0]["token_ids"])
            self._under_way += len(together)
            self._keep(self._ask_together(together))

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_together(self, together: Sequence[Waiting]) -> None:
        missing = {request["name"]: answer for request, answer in together}
        try:
            async with self._process.stream(TOGETHER, [request for request, _ in together], urgent=True) as incoming:
                if incoming.status != 200:
                    text = (await incoming.whole()).text
                    raise EngineError(f"engine: vLLM refuses requests with {incoming.status}: {text[:500]}")
                async for told in _lines(incoming.pieces()):
                    answer = missing.pop(told["name"])
                    self._ended(1)
                    if why := told.get("refused"):
                        _fail(answer, EngineError(f"engine: vLLM refuses a request: {why[:500]}"))
                    elif not answer.done():
                        answer.set_result(told)
            if missing:
                raise EngineError(f"engine: vLLM gave no answer to {len(missing)} requests")
        except asyncio.CancelledError:
            self._give_up(missing, EngineError("engine: closed"))
            raise
        except Exception as error:  # noqa: BLE001 - it is the answer to all that were asked together
            self._give_up(missing, error)

    def _give_up(self, missing: dict[str, asyncio.Future[dict[str, Any]]], error: Exception) -> None:
        self._ended(len(missing))
        for answer in missing.values():
            _fail(answer, error)

    def _ended(self, count: int) -> None:
        self._under_way -= count
        if self._waiting and count:
            self._go_on()

    # --- requests whose caller was cancelled

    def _drop(self, name: str) -> None:
        self._dropped.append(name)
        if len(self._dropped) == 1:
            self._keep(self._abort())

    async def _abort(self) -> None:
        await asyncio.sleep(0)
        dropped, self._dropped = self._dropped, []
        with suppress(EngineError):  # a vLLM that is gone computes none of them
            await self._process.post(ABORTED, dropped, deadline_s=CONTROL_S)


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield decoded(line)


def _fail(answer: asyncio.Future[dict[str, Any]], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
