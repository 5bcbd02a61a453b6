"""One end of the socket between the halves: asks, and answers what it is asked.

consumes: frames of the other half      waits for: its answers; for ever, unless the caller says how long
produces: answers; `gone`, once the other half has closed, died or broken the rules
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tandem import errors
from tandem.errors import EngineLost, TandemError
from tandem.io import json_frames
from tandem.online.messages import Asked, JobProgress, Question, RpcFailure, RpcReply, decode, encode

_log = logging.getLogger(__name__)

Handle = Callable[[Asked], Awaitable[dict[str, Any]]]


class PeerLost(EngineLost):
    """The other half is gone; what it was asked has no answer."""


class RpcConnection:
    def __init__(self, handle: Handle, name: str) -> None:
        """`handle` answers questions, several at a time. `name`: of the other half, for people."""
        self.gone = asyncio.Event()
        self._handle, self._name = handle, name
        self._number = 0
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, end: socket.socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=end)
        self._reading = asyncio.create_task(self._read(json_frames.Reader(reader)), name=f"from the {self._name}")

    async def ask(self, what: Asked, deadline_s: float | None = None) -> dict[str, Any]:
        """The answer; the other half's error, of its class; HalfLost. `TimeoutError` after the deadline."""
        if self.gone.is_set() or self._writer is None:
            raise PeerLost(f"online: the {self._name} is gone")
        self._number += 1
        number = self._number
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._write(Question(number, what))
            async with asyncio.timeout(deadline_s):
                return await answer
        finally:
            self._open.pop(number, None)

    def tell(self, what: JobProgress) -> None:
        """Not answered; a half that is gone does not hear it."""
        if not self.gone.is_set():
            self._write(Question(0, what))

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._end("it was closed")

    def _write(self, message: Question | RpcReply) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(json_frames.framed(encode(message)))

    async def _read(self, source: json_frames.Reader) -> None:
        why = "it closed its end"
        try:
            while frame := await source.read():
                self._take(decode(frame))
        except (json_frames.BadFrame, msgspec.ValidationError, msgspec.DecodeError) as error:
            why = f"what it said is not of this protocol: {error}"
            _log.error("the %s: %s", self._name, why)
        finally:
            self._end(why)

    def _take(self, message: Question | RpcReply) -> None:
        if isinstance(message, Question):
            task = asyncio.create_task(self._answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        waiting = self._open.pop(message.number, None)
        if waiting is None or waiting.done():  # the caller has given up
            return
        if message.failure is None:
            waiting.set_result(message.value)
        else:
            waiting.set_exception(_error_of(message.failure))

    async def _answer(self, question: Question) -> None:
        try:
            answer = RpcReply(question.number, await self._handle(question.what))
        except TandemError as error:
            answer = RpcReply(question.number, failure=RpcFailure(type(error).__name__, str(error)))
        except Exception as error:  # noqa: BLE001 - the other half must hear of it, whatever it is
            _log.exception("%s failed", type(question.what).__name__)
            answer = RpcReply(question.number, failure=RpcFailure("TandemError", f"{type(error).__name__}: {error}"))
        if question.number:
            self._write(answer)

    def _end(self, why: str) -> None:
        if self.gone.is_set():
            return
        self.gone.set()
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(PeerLost(f"online: the {self._name} is gone: {why}"))
                waiting.exception()  # mark it as retrieved, in case the caller gave up
        self._open.clear()
        for task in self._answering:
            task.cancel()
        if self._writer is not None:
            self._writer.close()


def _error_of(failure: RpcFailure) -> TandemError:
    kind = getattr(errors, failure.kind, TandemError)
    if not (isinstance(kind, type) and issubclass(kind, TandemError)):
        kind = TandemError
    try:
        return kind(failure.text)
    except TypeError:  # one that is made of more than its text
        return TandemError(failure.text)
