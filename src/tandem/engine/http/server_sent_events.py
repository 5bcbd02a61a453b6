"""Server-sent events, as they come in."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

from tandem.errors import EngineError

ANSWER_BYTES = 4 * 2**20
"""Of one event, or of one answer that is no stream."""


async def server_sent(pieces: AsyncIterable[bytes], where: str) -> AsyncGenerator[bytes]:
    """The data of each event. Lines end as the bytes do: not at U+2028, in the midst of a text that is told; and one
    without an end would fill the memory."""
    rest, data, held = b"", list[bytes](), 0
    async for chunk in pieces:
        *lines, rest = (rest + chunk).split(b"\n")
        held += len(chunk)
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
            elif not line:
                held = len(rest)
                if data:
                    yield b"\n".join(data)
                    data = []
        if held > ANSWER_BYTES:
            raise EngineError(f"{where}: an event of more than {ANSWER_BYTES} bytes")
