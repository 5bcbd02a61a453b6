"""Send requests to vLLM that are made at about the same time in one request of HTTP.

consumes: requests, each with a name     waits for: vLLM, of which each answer comes as it ends
produces: their answers

`tandem.vllm_worker.together_route` is the other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from tandem.engine.vllm.process import CONTROL_S, VllmProcess
from tandem.errors import EngineError, TandemError
from tandem.io.engine_messages import decoded
from tandem.ops.vllm_token_protocol import ABORT, TOGETHER

Answer: TypeAlias = "asyncio.Future[dict[str, Any]]"

_MOST_TOGETHER, _MOST_IDS = 64, 2**16  # they are written and read in one piece, and all others wait meanwhile


class RequestsTogether:
    def __init__(self, process: VllmProcess) -> None:
        self._process = process
        self._waiting = dict[str, tuple[Mapping[str, Any], Answer]]()
        self._sent = dict[str, Answer]()
        self._dropped: list[str] = []
        self._closed = False
        self._sending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        return len(self._sent)

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return vLLM's answer to a request with a `name`. If the caller is cancelled, vLLM aborts it."""
        if self._closed:
            raise EngineError("engine: closed")
        answer: Answer = asyncio.get_running_loop().create_future()
        self._waiting[request["name"]] = request, answer
        self._go_on()
        try:
            return await answer
        except asyncio.CancelledError:
            if self._waiting.pop(request["name"], None) is None:
                self._drop(request["name"])
            raise

    async def close(self) -> None:
        self._closed = True
        answers = [*(answer for _, answer in self._waiting.values()), *self._sent.values()]
        self._waiting.clear()
        tasks = [*self._tasks, *([self._sending] if self._sending else [])]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for answer in answers:
            _fail(answer, EngineError("engine: closed"))

    # --- sending

    def _go_on(self) -> None:
        if self._waiting and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send(), name="requests to vLLM")

    async def _send(self) -> None:
        for _ in range(2):  # until the other requests of this moment are here
            await asyncio.sleep(0)
        while self._waiting and (room := self._process.most_requests - len(self._sent)) > 0:
            together, ids = list[Mapping[str, Any]](), 0
            while self._waiting and len(together) < min(room, _MOST_TOGETHER) and ids < _MOST_IDS:
                name = next(iter(self._waiting))
                request, self._sent[name] = self._waiting.pop(name)
                together.append(request)
                ids += len(request["token_ids"])
            self._keep(asyncio.create_task(self._ask_together(together)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_together(self, together: Sequence[Mapping[str, Any]]) -> None:
        names = [request["name"] for request in together]
        try:
            async with self._process.stream(TOGETHER, together, urgent=True) as incoming:
                if incoming.status != 200:
                    text = (await incoming.whole()).text
                    raise self._process.refusal("requests", incoming.status, text)
                for name in names:
                    if self._sent[name].cancelled():  # vLLM may have been told to abort it before it had it
                        self._drop(name)
                async for told in _lines(incoming.pieces()):
                    answer = self._sent.pop(told["name"])
                    self._go_on()
                    if why := told.get("refused"):
                        _fail(answer, EngineError(f"engine: vLLM refuses a request: {why[:500]}"))
                    elif not answer.done():
                        answer.set_result(told)
            if missing := sum(name in self._sent for name in names):
                raise EngineError(f"engine: vLLM gave no answer to {missing} requests{self._process.cause()}")
        except TandemError as error:
            self._fail_all(names, error)
        except Exception as error:  # noqa: BLE001 - it is told to all that were asked together
            self._fail_all(names, EngineError(f"engine: vLLM's answer is none: {type(error).__name__}: {error}"))

    def _fail_all(self, names: Sequence[str], error: TandemError) -> None:
        for name in names:
            if (answer := self._sent.pop(name, None)) is not None:
                _fail(answer, type(error)(*error.args))  # each caller gets one of its own
        self._go_on()

    # --- requests whose caller was cancelled

    def _drop(self, name: str) -> None:
        self._dropped.append(name)
        if len(self._dropped) == 1:
            self._keep(asyncio.create_task(self._abort()))

    async def _abort(self) -> None:
        await asyncio.sleep(0)
        dropped, self._dropped = self._dropped, []
        with suppress(EngineError):  # a vLLM that is gone computes none of them
            await self._process.post(ABORT, dropped, deadline_s=CONTROL_S)


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield decoded(line)


def _fail(answer: Answer, error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
