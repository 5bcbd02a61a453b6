"""A connection to one run of an engine's server: requests to it, and a watch that notices when it is gone.

consumes: requests                       waits for: answers, within a deadline for each or until the watch ends it
produces: completions, and `gone`        set within 10 s after the engine ended, hung or restarted

The watch has its own thread and connection, so that a trainer that blocks the event loop is not taken for an engine
that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

import httpx

from tandem.engine.http.client import Broken, HttpClient, HttpResponse, Silent
from tandem.errors import EngineError, EngineLost, EngineSilent, NotLetIn
from tandem.io.engine_messages import decoded, encoded, error_of
from tandem.protocols import OnToken
from tandem.types import Completion, Sampling, Span

_log = logging.getLogger(__name__)

BEAT_S, BEAT_TIMEOUT_S, _BEATS_MISSED = 1.0, 1.5, 3
STREAMS = 512  # open files are limited; later requests wait for a stream
_STATUS_S = 5.0
_TRIES = 3
SENT = ("max_tokens", "temperature", "top_p", "top_k", "stop", "stop_ids", "seed", "urgent", "share")
_LAST_WORDS_S = 0.2  # the exit code is known a moment after the connections broke

T = TypeVar("T")


class Connection:
    def __init__(self, url: str, token: str, exit_report: Callable[[], str] = lambda: "") -> None:
        """`exit_report`: returns how the engine's process ended, if this process owns it and it ended."""
        self.url = url
        self.boot_id = ""
        self.gone, self.why = asyncio.Event(), ""
        self.left = False
        """Closed by this process on purpose: the engine is not lost."""
        self._headers = {"Authorization": f"Bearer {token}"}
        self._exit_report = exit_report
        self._http = HttpClient(url, headers=self._headers, most=STREAMS)
        self._under_way: set[asyncio.Task[Any]] = set()
        self._closed = threading.Event()
        self._loaded = self._tells_late = False

    async def open(self) -> Mapping[str, Any]:
        """Return its status; raise EngineLost, and close, if it does not answer."""
        try:
            status = await self.status()
            if not isinstance(status.get("boot_id"), str):
                raise EngineError(f"engine: the server at {self.url} is not an engine of `tandem engine serve`")
        except BaseException:
            await self.close()
            raise
        self.boot_id = status["boot_id"]
        self._tells_late = bool(status.get("told_within_s"))
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="engine watch", daemon=True).start()
        return status

    def expect_loaded(self) -> None:
        """Treat the engine as lost, from now on, if it does not answer."""
        self._loaded = True

    async def status(self) -> Mapping[str, Any]:
        return await self._ask("GET", "/engine/status", None, _STATUS_S)

    async def post(self, route: str, body: Mapping[str, Any], read_s: float) -> Mapping[str, Any]:
        """Return the answer, or raise the error that it contains."""
        return await self._unless_gone(self._ask("POST", route, body, read_s))

    async def complete(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None, on_token: OnToken | None
    ) -> Completion:
        """Sample one completion. EngineLost if the engine is lost; after a broken connection, ask from the start."""
        if sampling.on_update:
            raise EngineError(
                f"engine: on_update = '{sampling.on_update}': {self.url} has one on_update setting for all requests"
            )
        if others := [name for name in sampling.extras if name != "images"]:
            raise EngineError(f"engine: {others[0]}: {self.url} takes it on OpenAI's routes only")
        asked = {name: getattr(sampling, name) for name in SENT}
        if self._tells_late:  # a server of an earlier checkout refuses what it does not know
            asked["told_within_s"] = sampling.told_within_s
        if sampling.images:
            asked["images"] = [asdict(image) for image in sampling.images]
        body = {
            "prompt_ids": list(prompt_ids),
            "sampling": asked,
            "session": session,
            "boot_id": self.boot_id,  # a restarted engine has other weights, and the watch notices late
        }
        content = encoded(body)
        for _ in range(_TRIES):
            try:
                return await self._unless_gone(self._stream(content, on_token, urgent=sampling.urgent))
            except Broken as error:
                await self._must_be_there(error)
        raise EngineLost(f"engine: {self.url} breaks every connection")

    async def leave(self, why: str) -> None:
        """Close, because another connection replaces this one: callers ask that one again."""
        self.left = True
        await self.close(why)

    async def close(self, why: str = "engine: closed") -> None:
        self._closed.set()
        self._set_gone(why)
        await self._http.close()

    # --- asking

    async def _ask(self, method: str, route: str, body: Mapping[str, Any] | None, read_s: float) -> Mapping[str, Any]:
        content = None if body is None else encoded(body)
        try:
            answer = await self._http.ask(method, route, content, within_s=read_s)
        except Silent as error:
            raise EngineSilent(f"engine: {self.url} gave no answer to {route} within {read_s:g} s") from error
        except Broken as error:
            raise EngineLost(self._describe(error)) from error
        return _checked(self.url + route, answer)

    async def _stream(self, content: bytes, on_token: OnToken | None, *, urgent: bool) -> Completion:
        # A request may queue for long, so only the watch limits the wait.
        growing, route = _Growing(on_token), "/engine/generate"
        async with self._http.stream(route, content, urgent=urgent) as answer:
            if answer.status != 200:
                _checked(self.url + route, await answer.whole())
            async for piece in answer.pieces():
                growing.feed(piece)
        if growing.completion is None:
            raise Broken("the answer has no end")
        return growing.completion

    async def _unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        if self.gone.is_set():
            work.close()
            raise EngineLost(self.why)
        asking = asyncio.create_task(work)
        self._under_way.add(asking)
        try:
            return await asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.gone.is_set() and not (task and task.cancelling()):
                raise EngineLost(self.why) from None
            raise
        finally:
            self._under_way.discard(asking)

    async def _must_be_there(self, error: Broken) -> None:
        """EngineLost unless the same engine still answers."""
        try:
            status = await self.status()
        except EngineError:
            await asyncio.sleep(_LAST_WORDS_S)
            self._set_gone(self._describe(error))
        else:
            if status["boot_id"] != self.boot_id:
                self._set_gone(_was_restarted(self.url))
        if self.gone.is_set():
            raise EngineLost(self.why) from error

    def _describe(self, error: Exception) -> str:
        how = self._exit_report() or (str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}")
        return f"engine: {self.url} is gone: {how}"

    # --- the watch

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        missed = 0
        with httpx.Client(
            base_url=self.url, headers=self._headers, trust_env=False, timeout=httpx.Timeout(BEAT_TIMEOUT_S)
        ) as client:
            while not self._closed.wait(BEAT_S):
                try:
                    why, missed = self._look(client), 0
                except (
                    httpx.HTTPError,
                    ValueError,
                    LookupError,
                    TypeError,
                ) as error:  # not an engine's status
                    missed += 1
                    why = self._describe(error) if missed == _BEATS_MISSED or self._exit_report() else ""
                if why:
                    with suppress(RuntimeError):  # the loop is closed, so no caller waits
                        loop.call_soon_threadsafe(self._set_gone, why)
                    return

    def _look(self, client: httpx.Client) -> str:
        """Return why the engine is lost although it answers; empty if it is not."""
        answer = client.get("/engine/status")
        if answer.status_code != 200:
            return f"engine: {self.url} answers {answer.status_code}: it is not the attached engine"
        status = answer.json()
        if status["boot_id"] != self.boot_id:
            return _was_restarted(self.url)
        if status["state"] == "dead" or (status["state"] == "torn" and self._loaded):
            return str(status["why"])
        return ""

    def _set_gone(self, why: str) -> None:
        if self.gone.is_set():
            return
        if not self._closed.is_set():
            _log.warning("%s", why)
        self.why = why
        self.gone.set()
        self._closed.set()
        for asking in self._under_way:
            asking.cancel()


class _Growing:
    """Builds a completion from pieces of its lines."""

    def __init__(self, on_token: OnToken | None) -> None:
        self.completion: Completion | None = None
        self._on_token, self._rest = on_token, b""
        self._ids: list[int] = []
        self._logprobs: list[float] = []

    def feed(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            told = decoded(line)
            if "ids" in told:
                self._add(told["ids"], told["logprobs"], told["version"])
            elif "error" in told:
                raise error_of(told, "engine: it failed without giving a reason")
            else:
                # Fewer than arrived: the request restarted under a new version, and its earlier tokens are dropped.
                start = len(self._ids) - sum(count for _, count in told["spans"])
                spans = [Span(version, count) for version, count in told["spans"]]
                self.completion = Completion(self._ids[start:], self._logprobs[start:], spans, told["finish_reason"])

    def _add(self, ids: list[int], logprobs: list[float], version: int) -> None:
        self._ids += ids
        self._logprobs += logprobs
        if self._on_token is not None:
            for token_id, logprob in zip(ids, logprobs, strict=True):
                self._on_token(token_id, logprob, version)


def _checked(url: str, answer: HttpResponse) -> Mapping[str, Any]:
    otherwise = f"engine: {url} answers {answer.status}: {answer.text[:200]}"
    if answer.status == 401:
        raise NotLetIn(f"engine: {url} refuses the token")
    try:
        body = decoded(answer.content)
    except ValueError:
        body = None
    if answer.status != 200:
        raise error_of(body, otherwise)
    if not isinstance(body, dict):
        raise EngineError(otherwise)
    return body


def _was_restarted(url: str) -> str:
    return f"engine: {url} was restarted; the attachment is gone"
