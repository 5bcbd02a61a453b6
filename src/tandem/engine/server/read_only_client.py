"""A client of an engine whose weights another process updates: it samples and never changes weights.

consumes: prompts                waits for: the engine; also for a restarting one, up to `patience_s`
produces: completions            each token with the version that sampled it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tandem.engine.server.connection import Connection
from tandem.errors import EngineError, EngineLost
from tandem.io.token_file import read_token
from tandem.protocols import OnToken
from tandem.types import Completion, Sampling

_LOOK_AGAIN_S, _TELL_S = 0.3, 10.0
_OPTION = "--engine-token-file"


class ReadOnlyClient:
    def __init__(self, url: str, token_file: Path, *, patience_s: float = 20.0) -> None:
        """`patience_s`: how long to wait for the engine to come back."""
        self._url, self._token_file, self._patience_s = url.rstrip("/"), token_file, patience_s
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self.version = -1

    def tell(self, route: str) -> Mapping[str, Any]:
        """Return the engine's answer to a GET of `route`; blocks."""
        try:
            headers = {"Authorization": f"Bearer {read_token(self._token_file, _OPTION)}"}
            answer = httpx.get(self._url + route, headers=headers, timeout=_TELL_S, trust_env=False)
            answer.raise_for_status()
            told = answer.json()
        except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise EngineLost(f"engine: none answers at {self._url}{route}: {error}") from error
        assert isinstance(told, dict)
        return told

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        connection = await self._connected()
        completion = await connection.complete(prompt_ids, sampling, session, on_token)
        if completion.spans:
            self.version = completion.spans[-1].version
        return completion

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self) -> Connection:
        async with self._connecting:
            if self._connection is not None:
                if not self._connection.gone.is_set():
                    return self._connection
                await self._connection.close()
                self._connection = None
            until = time.monotonic() + self._patience_s
            while self._connection is None:
                try:
                    self._connection = await self._open()
                except (EngineError, OSError) as error:
                    if time.monotonic() > until:
                        raise EngineLost(f"engine: none answers at {self._url}: {error}") from error
                    await asyncio.sleep(_LOOK_AGAIN_S)
            return self._connection

    async def _open(self) -> Connection:
        connection = Connection(self._url, read_token(self._token_file, _OPTION))
        status = await connection.open()
        self.version = int(status["version"])
        return connection
