"""HTTP client of a rollout service: it sends each write with its own key and retries until it gets a reply.

So a restarted service, a broken connection or a lost reply costs only time.
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
from tandem.io.retry_after import retry_after_s
from tandem.io.token_file import read_token

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)

_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
_MOST_WAIT_S, _CONNECT_S, _READ_S = 10.0, 5.0, 60.0
_LOG_EVERY_S = 30.0


class ServiceClient:
    def __init__(
        self,
        url: str,
        token_file: Path,
        *,
        patience_s: float = float("inf"),
        url_option: str = "rollouts.url",
        token_option: str = "rollouts.token_file",
    ) -> None:
        """`patience_s`: how long to retry a service that does not answer or has no room, before StoreTimeout.
        `url_option`, `token_option`: the names of these options in errors."""
        import httpx

        self.url, self._token_file, self._patience_s = url.rstrip("/"), token_file, patience_s
        self._url_option, self._token_option, self._was_accepted = url_option, token_option, False
        if not url.startswith(("http://", "https://")):
            raise SpecError(
                f"{url_option} = '{url}' is not a URL; give the one that `tandem rollouts serve` prints: http://HOST:PORT"
            )
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=64),
            follow_redirects=False,
            trust_env=False,  # no proxy from environment variables: it would see the token
        )
        self._logged_at = float("-inf")

    async def check_service(self) -> None:
        """Wait until the service answers. SpecError if it is not a rollout service or refuses the token: retries would
        not help."""
        answer = await self._answer("GET", "/limits", None, {}, 0.0)
        if answer.status_code == 401:
            raise SpecError(
                f"{self._token_option} = '{self._token_file}' holds a token that {self.url} refuses; "
                "use the token file in that service's data directory"
            )
        if answer.status_code != 200 or b'"queued_groups"' not in answer.content:
            raise SpecError(
                f"{self._url_option} = '{self.url}': the server there is not a rollout service (GET /limits: "
                f"{answer.status_code}); give the URL that `tandem rollouts serve` prints"
            )

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
        """Post and return the reply, or raise the error that it names. `wait_s`: how long the service may wait before
        it replies. `key`: an idempotency key that must outlive this process."""
        content = body if isinstance(body, bytes) else json.dumps(body, allow_nan=False).encode()
        headers = {"Content-Type": content_type, "Idempotency-Key": key or uuid.uuid4().hex}
        return _object(await self._ask("POST", path, content, headers, wait_s))

    async def post_for_bytes(self, path: str, body: Mapping[str, Any], accept: str, *, wait_s: float = 0.0) -> bytes:
        """Post and return the reply's bytes; empty if the service had nothing within `wait_s`."""
        headers = {"Content-Type": "application/json", "Accept": accept, "Idempotency-Key": uuid.uuid4().hex}
        return (await self._ask("POST", path, json.dumps(body, allow_nan=False).encode(), headers, wait_s)).content

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str], wait_s: float
    ) -> httpx.Response:
        return _checked(await self._answer(method, path, content, headers, wait_s))

    async def _answer(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str], wait_s: float
    ) -> httpx.Response:
        """Retry until the reply is final, whether good or bad."""
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
                self._was_accepted |= answer.status_code != 401
                if answer.status_code not in _BUSY:
                    return answer
                why = f"answered {answer.status_code}: {_message(answer)}"
                pause_s = retry_after_s(answer.headers.get("retry-after", "")) or 0.0
            if time.monotonic() - since > self._patience_s:
                raise StoreTimeout(f"rollouts: {self.url} did not answer within {self._patience_s:g} s: {why}")
            self._log_retry(why)
            attempt += 1
            grown_s = min(0.1 * 2 ** min(attempt, 10), _MOST_WAIT_S) * random.uniform(0.5, 1.0)
            await asyncio.sleep(max(min(pause_s, _MOST_WAIT_S), grown_s))

    def _token(self) -> str:
        """Read the token for each request: a recreated service has a new one, and its file may be missing for a moment.
        Before the first accepted request a missing file is a wrong path, which raises SpecError."""
        try:
            return read_token(self._token_file, self._token_option)
        except OSError as error:
            if self._was_accepted:
                raise
            raise SpecError(
                f"{self._token_option} = '{self._token_file}': {error.strerror}; it must be the file that holds the "
                f"token of {self.url} (a service writes it when it starts)"
            ) from error

    def _log_retry(self, why: str) -> None:
        if time.monotonic() - self._logged_at > _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            _log.warning("rollouts: retrying %s: %s", self.url, why)


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
        raise StoreError(f"rollouts: {answer.url.path} answered with invalid JSON: {error}") from error
    if not isinstance(body, dict):
        raise StoreError(f"rollouts: {answer.url.path} answered with JSON that is not an object")
    return cast("dict[str, Any]", body)


def _error(answer: httpx.Response) -> dict[str, Any]:
    try:
        error = answer.json()["error"]
    except (ValueError, LookupError, TypeError):
        return {}
    return cast("dict[str, Any]", error) if isinstance(error, dict) else {}


def _message(answer: httpx.Response) -> str:
    return str(_error(answer).get("message") or answer.text[:200])


def _field(answer: httpx.Response) -> str:
    return str(_error(answer).get("field") or "body")
