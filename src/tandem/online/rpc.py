"""RPC over a socket between the server process and the trainer process: both ends send requests and serve them.

consumes: frames of the other process   waits for: its replies; without end unless the caller gives a deadline
produces: replies; `gone`, once the other process has closed its end, died or broken the protocol
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
from tandem.online.messages import JobProgress, RpcCall, RpcFailure, RpcReply, RpcRequest, decode, encode

_log = logging.getLogger(__name__)

Handle = Callable[[RpcCall], Awaitable[dict[str, Any]]]


class ConnectionLost(EngineLost):
    """The other process is gone; requests to it get no reply."""


class RpcConnection:
    """One end of the connection."""

    def __init__(self, handle: Handle, name: str) -> None:
        """`handle` serves requests, several at a time. `name`: what errors call the other process."""
        self.gone = asyncio.Event()
        self._handle, self._name = handle, name
        self._number = 0
        self._in_flight: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, end: socket.socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=end)
        self._reading = asyncio.create_task(self._read(json_frames.Reader(reader)), name=f"from the {self._name}")

    async def call(self, what: RpcCall, deadline_s: float | None = None) -> dict[str, Any]:
        """Send a request and return the reply. Raises the other process's error with its class; ConnectionLost;
        `TimeoutError` after the deadline."""
        if self.gone.is_set() or self._writer is None:
            raise ConnectionLost(f"online: the {self._name} is gone")
        self._number += 1
        number = self._number
        reply = self._in_flight[number] = asyncio.get_running_loop().create_future()
        try:
            self._write(RpcRequest(number, what))
            async with asyncio.timeout(deadline_s):
                return await reply
        finally:
            self._in_flight.pop(number, None)

    def notify(self, what: JobProgress) -> None:
        """Send a message without a reply; does nothing if the other process is gone."""
        if not self.gone.is_set():
            self._write(RpcRequest(0, what))

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._end("it was closed")

    def _write(self, message: RpcRequest | RpcReply) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(json_frames.framed(encode(message)))

    async def _read(self, source: json_frames.Reader) -> None:
        why = "it closed its end"
        try:
            while frame := await source.read():
                self._take(decode(frame))
        except (json_frames.BadFrame, msgspec.ValidationError, msgspec.DecodeError) as error:
            why = f"it sent a message that is not in this protocol: {error}"
            _log.error("the %s: %s", self._name, why)
        finally:
            self._end(why)

    def _take(self, message: RpcRequest | RpcReply) -> None:
        if isinstance(message, RpcRequest):
            task = asyncio.create_task(self._serve(message))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            return
        waiting = self._in_flight.pop(message.number, None)
        if waiting is None or waiting.done():  # the caller has given up
            return
        if message.failure is None:
            waiting.set_result(message.value)
        else:
            waiting.set_exception(_error_of(message.failure))

    async def _serve(self, request: RpcRequest) -> None:
        try:
            reply = RpcReply(request.number, await self._handle(request.what))
        except TandemError as error:
            reply = RpcReply(request.number, failure=RpcFailure(type(error).__name__, str(error)))
        except Exception as error:  # noqa: BLE001 - the other process waits for a reply to every request
            _log.exception("%s failed", type(request.what).__name__)
            reply = RpcReply(request.number, failure=RpcFailure("TandemError", f"{type(error).__name__}: {error}"))
        if request.number:  # 0: a notification
            self._write(reply)

    def _end(self, why: str) -> None:
        if self.gone.is_set():
            return
        self.gone.set()
        for waiting in self._in_flight.values():
            if not waiting.done():
                waiting.set_exception(ConnectionLost(f"online: the {self._name} is gone: {why}"))
                waiting.exception()  # mark it as retrieved, in case the caller gave up
        self._in_flight.clear()
        for task in self._serving:
            task.cancel()
        if self._writer is not None:
            self._writer.close()


def _error_of(failure: RpcFailure) -> TandemError:
    kind = getattr(errors, failure.kind, TandemError)
    if not (isinstance(kind, type) and issubclass(kind, TandemError)):
        kind = TandemError
    try:
        return kind(failure.text)
    except TypeError:  # a class whose constructor takes more than a text
        return TandemError(failure.text)
