"""HTTP by a parser in C, for services whose bodies are large: uvicorn's, with a bound on what comes before a body."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES = 64 * 2**10


class FastHttp(HttpToolsProtocol):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes, self._in_head, self._ended = 0, True, False

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
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_bytes, self._in_head, self._ended = 0, True, True
