"""Asking a rollout service: every write has a key of its own, and is repeated under it until it is answered.

So a service that is started again, a connection that breaks, and an answer that is lost cost time and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tandem.errors import Conflict, Fenced, GroupRefused, NotKnown, SpecError, Starved, StoreError, StoreTimeout

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)

_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
_MOST_WAIT_S, _CONNECT_S, _READ_S = 10.0, 5.0, 60.0
_TELL_EVERY_S = 30.0


class ServiceClient:
    def __init__(
        self, url: str, token_file: Path, *, patience_s: float = float("inf"), token_option: str = "rollouts.token_file"
    ) -> None:
        """`patience_s`: for a service that does not answer, or has no room; then StoreTimeout. `token_option`: what an
        error calls `token_file`."""
        import httpx

        self.url, self._token_file, self._patience_s = url.rstrip("/"), token_file, patience_s
        self._token_option, self._was_let_in = token_option, False
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=64),
            follow_redirects=False,
            trust_env=False,  # no proxy of the environment: the token is for this service alone
        )
        self._silent_since = self._told_at = float("-inf")

    async def get(self, path: str) -> dict[str, Any]:
        return _object(await self._ask("GET", path, None, {}, 0.0))

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        *,
        content_type: str = "application/json",
        wait_s: float = 0.0,
        key: str = "",
    ) -> dict[str, Any]:
        """`wait_s`: how long the service itself may wait before it answers. `key`: where one outlives this process. The
        answer, or the error that it names."""
        content = body if isinstance(body, bytes) else json.dumps(body, allow_nan=False).encode()
        headers = {"Content-Type": content_type, "Idempotency-Key": key or uuid.uuid4().hex}
        return _object(await self._ask("POST", path, content, headers, wait_s))

    async def post_for_bytes(self, path: str, body: Mapping[str, Any], accept: str, *, wait_s: float = 0.0) -> bytes:
        """Empty where the service had nothing within `wait_s`."""
        headers = {"Content-Type": "application/json", "Accept": accept, "Idempotency-Key": uuid.uuid4().hex}
        return (await self._ask("POST", path, json.dumps(body, allow_nan=False).encode(), headers, wait_s)).content

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str], wait_s: float
    ) -> httpx.Response:
        import httpx

        since, attempt = time.monotonic(), 0
        while True:
            timeout = httpx.Timeout(_READ_S + wait_s, connect=_CONNECT_S)
            try:
                allowed = {**headers, "Authorization": f"Bearer {self._token()}"}
                answer = await self._client.request(method, path, content=content, headers=allowed, timeout=timeout)
            except (httpx.TransportError, OSError) as error:
                why, pause_s = f"{type(error).__name__}: {error}".rstrip(": "), 0.0
            else:
                self._was_let_in |= answer.status_code != 401
                if answer.status_code not in _BUSY:
                    return _checked(answer)
                why, pause_s = f"answered {answer.status_code}: {_message(answer)}", _asked_pause_s(answer)
            if time.monotonic() - since > self._patience_s:
                raise StoreTimeout(f"rollouts: {self.url} did not answer within {self._patience_s:g} s: {why}")
            self._tell(why)
            attempt += 1
            grown_s = min(0.1 * 2 ** min(attempt, 10), _MOST_WAIT_S) * random.uniform(0.5, 1.0)
            await asyncio.sleep(max(min(pause_s, _MOST_WAIT_S), grown_s))

    def _token(self) -> str:
        """Read every time: a service made anew has a new one. Its file may be gone for a moment then, but not before
        it was ever of use: that is a typing error, which no repetition mends."""
        try:
            return self._token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            if self._was_let_in and isinstance(error, OSError):
                raise
            why = getattr(error, "strerror", None) or str(error)
            raise SpecError(
                f"{self._token_option} = '{self._token_file}': {why}; it must be the file that holds the token of "
                f"{self.url} (a service writes it when it starts)"
            ) from error

    def _tell(self, why: str) -> None:
        if time.monotonic() - self._told_at > _TELL_EVERY_S:
            self._told_at = time.monotonic()
            _log.warning("rollouts: %s is asked again: %s", self.url, why)


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.status_code in (200, 204):
        return answer
    text = f"rollouts: {answer.url.path}: {_message(answer)}"
    match answer.status_code:
        case 404:
            raise NotKnown(text)
        case 409:
            raise {"fenced": Fenced, "starved": Starved}.get(str(_error(answer).get("code")), Conflict)(text)
        case 413 | 422:
            raise GroupRefused(_field(answer), text)
        case status:
            raise StoreError(f"{text} ({status})")


def _object(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code == 204:
        return {}
    try:
        body = answer.json()
    except ValueError as error:
        raise StoreError(f"rollouts: {answer.url.path} answered what is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise StoreError(f"rollouts: {answer.url.path} answered what is no JSON object")
    return cast("dict[str, Any]", body)


def _error(answer: httpx.Response) -> dict[str, Any]:
    try:
        told = answer.json()["error"]
    except (ValueError, LookupError, TypeError):
        return {}
    return cast("dict[str, Any]", told) if isinstance(told, dict) else {}


def _message(answer: httpx.Response) -> str:
    return str(_error(answer).get("message") or answer.text[:200])


def _field(answer: httpx.Response) -> str:
    return str(_error(answer).get("field") or "body")


def _asked_pause_s(answer: httpx.Response) -> float:
    said = answer.headers.get("retry-after", "")
    return float(said) if said.isdigit() and len(said) < 6 else 0.0
