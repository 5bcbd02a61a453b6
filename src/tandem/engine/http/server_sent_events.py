"""Read server-sent events from a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

from tandem.errors import EngineError

ANSWER_BYTES = 4 * 2**20
"""Most bytes of one event, or of one response that is no stream."""


async def server_sent(pieces: AsyncIterable[bytes], where: str) -> AsyncGenerator[bytes]:
    """Yield the data of each event. Lines end at newline bytes only, because U+2028 may be inside a text. The size of
    an event is limited, so that a line without an end cannot fill the memory."""
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
