"""A replica that a test plays: it answers what the test says, as slowly as the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]


@dataclass
class FakeReplica:
    """`answer`: returns the status and body for a path and a body."""

    answer: Answer
    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    hang_ups: int = 0
    """How many of the next requests it reads and does not answer."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        path, body = head.split()[1].decode(), json.loads(await reader.readexactly(size))
        self.asked.append((path, body))
        if self.hang_ups:
            self.hang_ups -= 1
            writer.close()
            return
        status, told = await self.answer(path, body)
        content = json.dumps(told).encode()
        fields = f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n"
        writer.write(f"HTTP/1.1 {status} OK\r\n{fields}\r\n".encode() + content)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def replica(answer: Answer) -> AsyncIterator[FakeReplica]:
    fake = FakeReplica(answer)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()


def saying(text: str) -> Answer:
    async def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"id": f"chatcmpl-x.{body.get('model')}", "model": body.get("model"), "text": text}

    return answer
