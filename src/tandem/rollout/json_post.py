"""Post JSON to a server of OpenAI's API; what passes by itself (a full queue, a restart) is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tandem.io.retry_after import retry_after_s

if TYPE_CHECKING:
    import httpx

_TRIES = 4
_MOST_WAIT_S = 30.0
_AT_ONCE = 64


class JsonPost:
    """One route. `timeout_s` limits each post, retries included, from when it has one of the connections."""

    def __init__(self, url: str, key: str, *, timeout_s: float) -> None:
        import httpx

        self.url, self._timeout_s = url, timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._certificates = httpx.create_ssl_context()  # takes 30 ms, which would block the event loop at each request

    async def post(self, body: Mapping[str, Any]) -> httpx.Response:
        """Return the answer, whatever its status; TimeoutError, or httpx.TransportError if there is none."""
        async with self._gate, asyncio.timeout(self._timeout_s):
            return await self._answer(body)

    async def _answer(self, body: Mapping[str, Any]) -> httpx.Response:
        import httpx

        client = httpx.AsyncClient(headers=self._headers, timeout=self._timeout_s, verify=self._certificates)
        async with client:
            for attempt in range(_TRIES):
                last = attempt == _TRIES - 1
                try:
                    response = await client.post(self.url, json=body)
                except httpx.TransportError:
                    if last:
                        raise
                    await asyncio.sleep(2.0**attempt / 4)
                    continue
                if response.status_code in (429, 500, 502, 503, 504) and not last:
                    await asyncio.sleep(_wait_s(response, attempt))
                    continue
                return response
        raise AssertionError("the last attempt answers or raises")


def _wait_s(response: httpx.Response, attempt: int) -> float:
    asked = retry_after_s(response.headers.get("retry-after", ""))
    return 2.0**attempt / 4 if asked is None else min(asked, _MOST_WAIT_S)
