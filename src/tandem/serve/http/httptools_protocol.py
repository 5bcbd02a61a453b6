"""uvicorn's HTTP parser in C, for services with large bodies. It limits the bytes before and after a body, and wakes
the reader once per body.

It drops the body of a request that offers HTTP/2, as some clients do, so it is only for services with known clients.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.serve.http.h11_protocol import TOO_THIN, Thinness

_MAX_HEAD_BYTES = 64 * 2**10
_PIECE_BYTES, _PIECE_S = 2**20, 1.0  # after _PIECE_S, so that the access gate can tell a slow body from none


class FastHttp(HttpToolsProtocol):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes, self._in_head, self._ended = 0, True, False
        self._body_bytes, self._thinness = 0, Thinness()
        self._parts: list[bytes] = []
        self._part_bytes, self._handed_s = 0, 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=0)  # a sender waits until the system accepted the earlier bytes
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        in_head, body_bytes, self._ended = self._in_head, self._body_bytes, False
        super().data_received(data)
        if self._in_head == in_head and self._body_bytes == body_bytes and not self._ended:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The request's head is too large.")
        if not (self._in_head or self._ended or self.cycle.response_started) and self._thinness.is_too_thin(
            len(data), self._body_bytes - body_bytes
        ):
            self.send_400_response(TOO_THIN)

    def on_message_begin(self) -> None:
        self._head_bytes, self._in_head, self._thinness = 0, True, Thinness()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are not used
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes, self._in_head, self._handed_s = 0, False, self.loop.time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Collect the pieces of a body. The access gate needs whole bodies, so waking it at each piece, and copying the
        earlier ones, would be wasted work."""
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            return
        self._parts.append(body)
        self._part_bytes += len(body)
        if self._part_bytes >= _PIECE_BYTES or self.loop.time() > self._handed_s + _PIECE_S:
            self.flow.pause_reading()
            self._hand_over()
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._parts:
            self._hand_over()
        super().on_message_complete()
        self._head_bytes, self._in_head, self._ended = 0, True, True

    def _hand_over(self) -> None:
        parts, self._parts, self._part_bytes, self._handed_s = self._parts, [], 0, self.loop.time()
        if self.cycle.body:
            parts.insert(0, bytes(self.cycle.body))
        body: Any = b"".join(parts)  # not a bytearray, which the receiver would copy
        self.cycle.body = body
