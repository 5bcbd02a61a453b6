"""uvicorn's HTTP parser, with a limit against bodies in tiny chunks: a chunk of one byte costs as much time as one of a
thousand."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_THIN = 4  # allowed bytes on the wire per byte of a body
_THIN_BYTES = 64 * 2**10  # allowed in excess of that, per request
TOO_THIN = "The body comes in chunks that are too small."


class Thinness:
    """Counts how many more bytes of one body came over the wire than its content justifies."""

    def __init__(self) -> None:
        self._extra = 0

    def is_too_thin(self, wire_bytes: int, body_bytes: int) -> bool:
        self._extra = max(0, self._extra + wire_bytes - _THIN * body_bytes)
        return self._extra > _THIN_BYTES


class PlainHttp(H11Protocol):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._thinness = Thinness()

    def data_received(self, data: bytes) -> None:
        cycle, before = self.cycle, len(self.cycle.body) if self.cycle else 0
        super().data_received(data)
        if cycle is None or self.cycle is not cycle:
            self._thinness = Thinness()
        elif not cycle.response_started and self._thinness.is_too_thin(len(data), len(cycle.body) - before):
            self.send_400_response(TOO_THIN)
