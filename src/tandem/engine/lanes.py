"""Connections that are kept. A client each: for every request, a client looks through all the connections it has,
several times over, and hundreds of requests spent more time there than the engine did sampling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx

IDLE_S = 4.0  # less than servers keep them: none is used as it is being closed
ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S)


class Lanes:
    def __init__(self, make: Callable[[], httpx.AsyncClient], most: int) -> None:
        """`make`: a client of one connection, with the limits `ONE`. Who comes when `most` are in use waits."""
        self._make, self._left = make, asyncio.Semaphore(most)
        self._idle: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []

    @asynccontextmanager
    async def take(self) -> AsyncIterator[httpx.AsyncClient]:
        async with self._left:
            client = self._idle.pop() if self._idle else self._new()
            try:
                yield client
            finally:
                self._idle.append(client)

    async def close(self) -> None:
        for client in self._all:
            await client.aclose()

    def _new(self) -> httpx.AsyncClient:
        client = self._make()
        self._all.append(client)
        return client
