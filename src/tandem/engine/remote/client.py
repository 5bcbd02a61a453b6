"""A client of an OpenAI-compatible server: every wait has a limit, every answer a size limit, every failure a type.

EngineLost: the server does not answer, or hung up. EngineError: it refuses. Error texts never contain the key.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tandem.engine.http.client import Broken, HttpClient, IncomingBody
from tandem.engine.http.server_sent_events import ANSWER_BYTES, server_sent
from tandem.errors import EngineError, EngineLost, SpecError
from tandem.io.bounded_json import parsed
from tandem.io.engine_messages import decoded, encoded
from tandem.io.retry_after import retry_after_s

_HEALTHY_S = 5.0
_BUSY_S, _BUSY_MOST_S = 1.0, 10.0  # after "too many requests" without a Retry-After
_TOLD_CHARS = 400
_DRAIN_S = 0.5
_API = "/v1"


class RemoteServer:
    """The server. `key_env` and `key_file` name the source of the API key, which is never shown."""

    def __init__(self, url: str, *, key_env: str = "", key_file: str = "") -> None:
        self.url = _checked(url)
        self._root = self.url.removesuffix(_API)
        key = _key(key_env, key_file)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = HttpClient(self._root, headers=headers, most=0)
        self._without_key = _without(key)

    async def close(self) -> None:
        await self._http.close()

    # --- requests with one response

    async def healthy(self, within_s: float) -> bool:
        try:
            status, _ = await self._ask("GET", "/health", None, within_s)
        except EngineLost:
            return False
        return status < 500  # many servers lack this route

    async def models(self, within_s: float) -> dict[str, Mapping[str, Any]]:
        """Return the models by the name that requests use."""
        status, body = await self._ask("GET", _API + "/models", None, within_s)
        if status != 200:
            raise (EngineLost if status >= 500 else EngineError)(self._refusal("GET /models", status, body))
        listed = body.get("data") if isinstance(body, dict) else None
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise EngineError(f"{self.url}/models: the answer is not a list of models")
        return {str(each.get("id")): each for each in listed}

    async def post(self, path: str, body: Mapping[str, Any], within_s: float) -> tuple[int, str]:
        """Post; return the status and the text of a refusal."""
        status, answer = await self._ask("POST", _API + path, body, within_s)
        return status, self._refusal(f"POST {path}", status, answer)

    async def _ask(self, method: str, path: str, body: Any, within_s: float) -> tuple[int, Any]:
        try:
            async with asyncio.timeout(within_s):
                async with self._open(method, path, body) as answer:
                    raw = await self._whole(answer)
        except TimeoutError:
            raise EngineLost(f"{self._root}{path}: no answer within {within_s:g} s") from None
        try:
            return answer.status, _loaded(raw)
        except ValueError:
            return answer.status, raw.decode(errors="replace")

    # --- requests with a stream

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Post; yield the events up to the mark that ends the stream. The caller limits the wait for each."""
        while True:
            async with self._open("POST", _API + path, body) as answer:
                if answer.status == 429:
                    wait_s = _retry_after(answer)
                else:
                    await self._check_stream(path, answer)
                    async with aclosing(server_sent(answer.pieces(), self.url)) as sent:
                        async for data in sent:
                            if data == b"[DONE]":
                                await _drain(sent)
                                return
                            yield await self._event(path, data)
                    raise EngineLost(f"{self.url}: the stream ended before its end mark")
            await asyncio.sleep(wait_s)

    async def _check_stream(self, path: str, answer: IncomingBody) -> None:
        if answer.status >= 400:
            raise await self._failure(f"POST {path}", answer.status, await self._whole(answer))
        if answer.status != 200:
            told = f"status {answer.status}; redirects are not followed; use the final URL"
            raise EngineError(f"{self.url}{path}: {told}")
        if answer.kind != "text/event-stream":
            raise EngineError(f"{self.url}{path}: asked for a stream, but the answer is '{answer.kind}'")

    async def _event(self, path: str, data: bytes) -> dict[str, Any]:
        try:
            event = _loaded(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise EngineError(f"{self.url}{path}: an event of the stream is not a JSON object")
        if event.get("error"):  # it failed after the status line was sent
            raise await self._failure(f"POST {path}", 500, data)
        return event

    # --- one connection and its errors

    @asynccontextmanager
    async def _open(self, method: str, path: str, body: Any) -> AsyncIterator[IncomingBody]:
        try:
            async with self._http.stream(path, None if body is None else encoded(body), method) as answer:
                yield answer
        except Broken as error:
            if self._http.closed:
                raise EngineError("engine: closed") from error
            told = " ".join(self._without_key(str(error)).split())  # aiohttp quotes unreadable bytes over several lines
            raise EngineLost(f"{self._root}{path}: {told}") from None

    async def _whole(self, answer: IncomingBody) -> bytes:
        raw = bytearray()
        async for piece in answer.pieces():
            raw += piece
            if len(raw) > ANSWER_BYTES:
                raise EngineError(f"{self.url}: an answer of more than {ANSWER_BYTES} bytes")
        return bytes(raw)

    async def _failure(self, what: str, status: int, raw: bytes) -> EngineError:
        """Return EngineError if the server is still healthy, and EngineLost if it is not."""
        text = self._refusal(what, status, raw.decode(errors="replace"))
        if status >= 500 and not await self.healthy(_HEALTHY_S):
            return EngineLost(f"{text}; and the server is no longer healthy")
        return EngineError(text)

    def _refusal(self, what: str, status: int, body: Any) -> str:
        told = body
        if isinstance(told, str):
            with suppress(ValueError):
                told = _loaded(told)
        while isinstance(told, dict):
            told = next((told[key] for key in ("error", "message", "detail") if told.get(key)), json.dumps(told))
        text = self._without_key(str(told))  # some servers quote the request
        return f"{self.url}: {what}: {status} {text[:_TOLD_CHARS]}"


def _checked(url: str) -> str:
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        raise SpecError(f"engine.urls: '{url}' is not a URL") from None
    if parts.scheme not in ("http", "https") or not parts.host:
        raise SpecError(f"engine.urls: '{url}' must begin with http:// or https://")
    if parts.userinfo:
        raise SpecError("engine.urls: a URL holds a user name or password; give the key by engine.key_env")
    if parts.query or parts.fragment or not parts.path.rstrip("/").endswith(_API):
        raise SpecError(f"engine.urls: '{url}' must be a base URL that ends in /v1")
    return str(parts).rstrip("/")


def _key(key_env: str, key_file: str) -> str:
    if key_env and key_file:
        raise SpecError("engine.key_env and engine.key_file are both set; set one of them")
    if not key_env and not key_file:
        return ""
    named = f"engine.key_env = '{key_env}'" if key_env else f"engine.key_file = '{key_file}'"
    try:
        key = (os.environ[key_env] if key_env else Path(key_file).read_text(encoding="utf-8")).strip()
    except (KeyError, OSError, UnicodeDecodeError):
        raise SpecError(f"{named}: there is no such " + ("environment variable" if key_env else "file")) from None
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise SpecError(f"{named}: its content is not a valid API key")
    return key


def _loaded(raw: bytes | str) -> Any:
    """Parse JSON; ValueError if it is invalid. NaN is accepted, because the caller names the field that has it."""
    try:
        return decoded(raw)
    except ValueError:
        return parsed(raw)


def _without(key: str) -> Callable[[str], str]:
    return lambda text: text.replace(key, "(the key)") if key else text


def _retry_after(answer: IncomingBody) -> float:
    asked = retry_after_s(answer.header("retry-after"))
    return _BUSY_S if asked is None else min(max(asked, 0.1), _BUSY_MOST_S)


async def _drain(rest: AsyncIterator[bytes]) -> None:
    """Read the rest of an ended stream, so that the connection can be reused."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            async for _ in rest:
                pass
