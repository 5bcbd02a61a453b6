"""Send JSON between two processes over a socket: four bytes of length, then UTF-8, with a size limit and no pickle."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

from tandem.errors import TandemError

MAX_BYTES = 16 * 2**20
_LENGTH = struct.Struct("!I")


class BadFrame(TandemError):
    """The other end broke the protocol, or is gone."""


def pack(value: Any) -> bytes:
    """Return a value as a frame. ValueError if JSON cannot represent it, or if it is too large."""
    return framed(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())


def framed(body: bytes) -> bytes:
    """Return a frame of bytes that are JSON already."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"{len(body)} bytes are more than the {MAX_BYTES} of a frame")
    return _LENGTH.pack(len(body)) + body


def send(to: socket.socket, value: Any, fds: Sequence[int] = ()) -> None:
    frame = pack(value)
    if not fds:
        to.sendall(frame)
        return
    sent = socket.send_fds(to, [frame], list(fds))
    to.sendall(frame[sent:])


def receive(source: socket.socket) -> bytes:
    """Return the next frame; empty once the other end has closed."""
    return receive_with_fds(source)[0]


def receive_with_fds(source: socket.socket, most_fds: int = 0) -> tuple[bytes, list[int]]:
    # Descriptors arrive with the first byte of their frame.
    head, fds, _, _ = socket.recv_fds(source, _LENGTH.size, most_fds)
    if not head:
        return b"", fds
    head += _exactly(source, _LENGTH.size - len(head))
    return _exactly(source, _length(head)), fds


class Reader:
    """Reads frames one after the other; a cancelled read loses no bytes."""

    def __init__(self, source: asyncio.StreamReader) -> None:
        self._source, self._next = source, 0

    async def read(self) -> bytes:
        """Return the next frame; empty once the other end has closed, even within a frame."""
        try:
            if not self._next:
                self._next = _length(await self._source.readexactly(_LENGTH.size))
            body = await self._source.readexactly(self._next)
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
        self._next = 0
        return body


def _length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= MAX_BYTES:
        raise BadFrame(f"a frame of {length} bytes; at most {MAX_BYTES} are read")
    return length


def _exactly(source: socket.socket, count: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < count:
        piece = source.recv(min(count - len(pieces), 2**20))
        if not piece:
            raise BadFrame("the other end closed within a frame")
        pieces += piece
    return bytes(pieces)
