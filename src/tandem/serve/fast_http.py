"""HTTP by a parser in C: uvicorn's, with a bound on what comes before a body. Whoever waits for a body is woken when
it is there, or a large piece of it."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES = 64 * 2**10
_PIECE_BYTES, _PIECE_S = 2**20, 1.0  # the latter, so that the door knows a slow body from none


class FastHttp(HttpToolsProtocol):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes, self._in_head, self._ended = 0, True, False
        self._parts: list[bytes] = []
        self._part_bytes, self._handed_s = 0, 0.0

    def data_received(self, data: bytes) -> None:
        in_head, self._ended = self._in_head, False
        super().data_received(data)
        if in_head and self._in_head and not self._ended:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        self._head_bytes, self._in_head = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._handed_s = False, self.loop.time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """The door reads a body whole: to wake it at each piece that the network made, and to copy what is there so
        far, is work for nothing."""
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
        body: Any = b"".join(parts)  # and not a bytearray, of which whoever receives it makes a copy
        self.cycle.body = body
