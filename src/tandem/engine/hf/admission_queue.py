"""The requests that wait for a row of the embedded engine, and the choice of those to prefill next.

consumes: requests      waits for: rows, room in the kv cache, and briefly for more requests to share a prefill
produces: waves         requests that are prefilled together

An urgent request goes first, alone, and no other request is admitted until it has ended. Among the others, the share
with the fewest rows is next; within a share, and between shares with equally many rows, the oldest request is next. If
there is no room for a share without rows, it gets a row of a share that has several.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, cast

from tandem.engine.hf.shaping import Shaper
from tandem.errors import SamplingRefused
from tandem.protocols import OnRanked, OnToken
from tandem.types import Alternatives, Completion, FinishReason, PlacedImage, Sampling, Span

_PATIENCE = 4  # iterations that a request waits for others to share its prefill


class Begun(NamedTuple):
    """What is there before a request's next token. Requests that have it in common are prefilled once."""

    adapter: str
    ids: tuple[int, ...]
    images: tuple[PlacedImage, ...]
    """Two images of one size have equal tokens."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    prompt: list[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    answer: asyncio.Future[Completion]
    on_token: OnToken | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    """[version, tokens], oldest first."""
    shaper: Shaper | None = None
    alternatives: list[Alternatives] = field(default_factory=list)
    adapter: str = ""
    """The adapter over the base that answers; empty: the base."""
    place: int = 0
    """Place in the queue; the lowest is first."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    @property
    def final_length(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def begun(self) -> Begun:
        return Begun(self.adapter, (*self.prompt, *self.ids), self.sampling.images)

    def add(self, token_id: int, logprob: float, version: int, ranked: Alternatives | None = None) -> None:
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += 1
        else:
            self.spans.append([version, 1])
        if ranked is not None:
            self.alternatives.append(ranked)
            if self.on_token is not None:
                cast("OnRanked", self.on_token)(token_id, logprob, version, ranked)
        elif self.on_token is not None:
            self.on_token(token_id, logprob, version)

    def begin_again(self) -> None:
        """Forget the sampled tokens; a caller that streams gets the new tokens after the old ones."""
        self.ids, self.logprobs, self.spans, self.alternatives = [], [], [], []
        if self.shaper is not None:
            self.shaper.reset()

    def refuse(self, why: str) -> None:
        """End the request alone: its grammar cannot go on."""
        grammar = self.sampling.shape.grammar
        self.fail(SamplingRefused(f"{grammar.field if grammar else 'grammar'}: {why}"))

    def fail(self, error: Exception) -> None:
        """End the request alone."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def finish(self, reason: FinishReason) -> None:
        if not self.answer.done():
            spans = [Span(version, count) for version, count in self.spans]
            self.answer.set_result(Completion(self.ids, self.logprobs, spans, reason, self.alternatives))


class AdmissionQueue:
    def __init__(self, *, max_running: int, positions: int, prefill_tokens: int) -> None:
        """`positions`: positions that fit in memory. `prefill_tokens`: most in one prefill, padding included."""
        self._max_running, self._positions, self._prefill_tokens = max_running, positions, prefill_tokens
        self._urgent = deque[QueuedRequest]()
        self._others: dict[str, deque[QueuedRequest]] = {}
        """Queues by share; none of them is empty."""
        self._first = self._last = 0
        self._passed_over = 0

    def __len__(self) -> int:
        return len(self._urgent) + self._num_others

    @property
    def _num_others(self) -> int:
        return sum(map(len, self._others.values()))

    def __iter__(self) -> Iterator[QueuedRequest]:
        return chain(self._urgent, sorted(chain(*self._others.values()), key=lambda request: request.place))

    def add(self, request: QueuedRequest) -> None:
        self._last += 1
        request.place = self._last
        self._line_of(request).append(request)

    def put_back(self, requests: Sequence[QueuedRequest]) -> None:
        """Put running requests back at the head of their queues."""
        for request in reversed(requests):
            self._first -= 1
            request.place = self._first
            self._line_of(request).appendleft(request)

    def _line_of(self, request: QueuedRequest) -> deque[QueuedRequest]:
        sampling = request.sampling
        return self._urgent if sampling.urgent else self._others.setdefault(sampling.share, deque())

    def keep(self, wanted: Callable[[QueuedRequest], bool]) -> None:
        self._urgent = deque(filter(wanted, self._urgent))
        kept = {share: deque(filter(wanted, line)) for share, line in self._others.items()}
        self._others = {share: line for share, line in kept.items() if line}

    def makes_room(self, running: Sequence[QueuedRequest]) -> QueuedRequest | None:
        """Return the running request that must go back to its queue to make room for the next one. None if there is
        room, or if the next request's share has a row already or no other share has two."""
        if not self._others or self._urgent or any(request.sampling.urgent for request in running):
            return None
        rows = Counter(request.sampling.share for request in running)
        share = self._next_share(rows)
        if rows[share] or max(rows.values(), default=0) < 2:
            return None
        longest = max(request.final_length for request in (*running, self._others[share][0]))
        if len(running) < self._max_running and self._has_room(longest, len(running), 1):
            return None
        ((most, _),) = rows.most_common(1)
        return min((each for each in running if each.sampling.share == most), key=lambda each: len(each.ids))

    def _next_share(self, rows: Mapping[str, int]) -> str:
        return min(self._others, key=lambda share: (rows[share], self._others[share][0].place))

    def next_wave(self, running: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        """Return the requests to prefill now: none while waiting for more rows pays, or while an urgent one runs."""
        self._passed_over = self._passed_over + 1 if self._others else 0
        if not self or any(request.sampling.urgent for request in running):
            return []
        longest = max((request.final_length for request in running), default=0)
        if self._urgent:
            final = max(longest, self._urgent[0].final_length)
            return [self._urgent.popleft()] if self._has_room(final, len(running), 1) else []
        free = self._max_running - len(running)
        wanted = min(self._num_others, max(1, self._max_running // 8))
        if running and free < wanted and self._passed_over < _PATIENCE:
            return []
        wave = self._first_together(longest, running, free)
        self._passed_over = 0 if wave else self._passed_over
        return wave

    def _first_together(self, final: int, running: Sequence[QueuedRequest], free: int) -> list[QueuedRequest]:
        """Take as many requests as have room and fit in one prefill. `final`: longest final length of running ones."""
        wave, longest, prompts = list[QueuedRequest](), 0, set[Begun]()
        rows = Counter(request.sampling.share for request in running)
        while self._others and len(wave) < free:
            share = self._next_share(rows)
            request = self._others[share][0]
            begun = request.begun
            final = max(final, request.final_length)
            longest = max(longest, len(begun.ids))
            if not self._has_room(final, len(running), len(wave) + 1):
                break
            if wave and longest * len(prompts | {begun}) > self._prefill_tokens:
                break
            prompts.add(begun)
            rows[share] += 1
            wave.append(self._others[share].popleft())
            if not self._others[share]:
                del self._others[share]
        return wave

    def _has_room(self, length: int, running: int, more: int) -> bool:
        """True if `more` requests of that length fit. A single request always fits: longer ones are refused earlier."""
        return running + more == 1 or length * (running + more) <= self._positions
