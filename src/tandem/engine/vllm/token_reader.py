"""Read the tokens and logprobs that vLLM's workers record, for all running requests in one call.

consumes: requests that began, and how they ended     waits for: the workers, between two of their steps
produces: tokens while they are sampled, and the logprobs of a completion

`tandem.vllm_worker.token_recorder` is the other end. A request's own answer has only its token ids; the ids read here
must be equal, or an error is raised. Tokens are streamed only up to max_tokens or the first id that ends the request:
the workers may have sampled further tokens, which are not returned.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, TypeAlias

from tandem.errors import EngineError, TandemError
from tandem.ops.vllm_token_protocol import Since, unpacked
from tandem.types import Span

_log = logging.getLogger(__name__)

Read: TypeAlias = Callable[[list[Any], list[Any], list[str]], Awaitable[dict[str, Sequence[Any]]]]
Tell: TypeAlias = Callable[[int, float, int], None]
"""Called with a token, its logprob and its version."""

_REQUESTS_PER_S = 500  # running requests to read per second, in total
_LEAST_S, _MOST_S = 0.02, 2.0


class TrackedRequest:
    """A request that the workers record under `name`, until its logprobs are known."""

    def __init__(self, name: str, max_tokens: int, end_ids: Collection[int], tell: Tell | None) -> None:
        self.name, self.ids, self.logprobs = name, array("i"), array("f")
        self._since: Since = []
        self._left, self._end_ids, self._tell = max_tokens, end_ids, tell
        self.told: asyncio.Future[None] | None = None
        """Set once the request has ended and waits for its missing tokens."""
        self.num_ids = -1
        self.error: Exception | None = None
        """An error raised by the caller's `on_token`."""

    @property
    def is_watched(self) -> bool:
        return self._tell is not None and self._left > 0

    @property
    def missing(self) -> list[Any]:
        return [self.name, len(self.ids), self.num_ids]

    @property
    def spans(self) -> list[Span]:
        ends = [*(position for position, _ in self._since[1:]), len(self.ids)]
        counts = [min(end, len(self.ids)) - start for (start, _), end in zip(self._since, ends, strict=True)]
        return [Span(version, count) for (_, version), count in zip(self._since, counts, strict=True) if count > 0]

    def grow(self, ids: array[int], logprobs: array[float], since: Since) -> None:
        """Add tokens of a running request; tokens after its end are dropped."""
        for position, token_id in enumerate(ids):
            self._left -= 1
            if not self._left or token_id in self._end_ids:
                self._left = 0
                ids, logprobs = ids[: position + 1], logprobs[: position + 1]
                break
        self._take(ids, logprobs, since)

    def end(self, ids: array[int], logprobs: array[float], since: Since) -> None:
        self._take(ids, logprobs, since)
        assert self.told is not None
        if not self.told.done():
            self.told.set_result(None)

    def fail(self, error: Exception) -> None:
        if self.told is not None and not self.told.done():
            self.told.set_exception(error)

    def _take(self, ids: array[int], logprobs: array[float], since: Since) -> None:
        first = len(self.ids)
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self._since = since
        if self._tell is None:
            return
        try:
            for position, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), first):
                version = next(version for start, version in reversed(since) if start <= position)
                self._tell(token_id, logprob, version)
        except Exception as error:  # noqa: BLE001  a failing `on_token` fails its own request only
            self._tell, self.error = None, error


class TokenReader:
    def __init__(self, read: Read, mark: str) -> None:
        """`mark`: prefix of the names of this engine's requests."""
        self._read, self._mark, self._numbers = read, mark, count()
        self._running: dict[str, TrackedRequest] = {}
        self._ended: list[TrackedRequest] = []
        self._dropped: list[str] = []
        self._news = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    @contextmanager
    def request(self, max_tokens: int, end_ids: Collection[int], tell: Tell | None) -> Iterator[TrackedRequest]:
        request = TrackedRequest(f"{self._mark}-{next(self._numbers)}", max_tokens, end_ids, tell)
        self._running[request.name] = request
        if request.is_watched:
            self._go_on()
        try:
            yield request
        finally:
            if self._running.pop(request.name, None) is not None:
                self._dropped.append(request.name)  # the next reading tells the workers

    async def logprobs(self, request: TrackedRequest, ids: Sequence[int]) -> list[float]:
        """Return the logprobs of an ended request's completion."""
        request.told, request.num_ids = asyncio.get_running_loop().create_future(), len(ids)
        self._running.pop(request.name)
        self._ended.append(request)
        self._go_on()
        await request.told
        if request.error is not None:
            raise request.error
        if request.ids.tolist() != list(ids):
            raise EngineError(
                f"engine: vLLM answered with {len(ids)} tokens, but its workers recorded other ones for this request"
            )
        return request.logprobs.tolist()

    async def close(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    # --- reading

    def _go_on(self) -> None:
        if self._ended:
            self._news.set()
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._keep_reading(), name="sampled tokens")

    async def _keep_reading(self) -> None:
        while self._ended or any(request.is_watched for request in self._running.values()):
            pause_s = min(max(len(self._running) / _REQUESTS_PER_S, _LEAST_S), _MOST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()
            self._news.clear()
            await self._read_once()

    async def _read_once(self) -> None:
        ended, dropped, self._ended, self._dropped = self._ended, self._dropped, [], []
        running = [request for request in self._running.values() if request.is_watched]
        try:
            news = await self._read([each.missing for each in running], [each.missing for each in ended], dropped)
            for request in running:
                request.grow(*unpacked(news[request.name]))
            for request in ended:
                request.end(*unpacked(news[request.name]))
        except TandemError as error:
            self._dropped = dropped + self._dropped
            for request in ended:
                request.fail(error)
            _log.warning("the sampled tokens could not be read: %s", error)
            await asyncio.sleep(_LEAST_S)
        except BaseException:
            for request in ended:
                request.fail(EngineError("engine: reading the sampled tokens was interrupted"))
            raise
