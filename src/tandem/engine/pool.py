"""Several engines that are one Engine: requests go to the least busy, versions to all of them.

An engine that is lost, silent, or could not load a version is left out. The pool sends its requests to another
engine; without another one, they wait. Sampling depends on prompt, weights and seed only, so a repeated request does
no harm; a caller that reads token by token gets the new tokens after the old ones.

    in ──(lost, silent, or failed to load a version that others loaded)──> out ──(found, or its wait is over)──> due
     ^                                                                                                            │
     └──────────────────── load <── joined <── attach ────────────────────────────────────────────────────────────┘

`lost` returns when an engine left or came back, so that the publisher attaches again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tandem.errors import EngineError, EngineLost, EngineSilent, SyncError
from tandem.ops.forwarding_source import Relay
from tandem.protocols import Engine, FindableEngine, OnToken, StartingEngine, WeightSource, why_not_sampled
from tandem.types import Completion, Sampling, Served, Weights

_log = logging.getLogger(__name__)
T = TypeVar("T")
SESSIONS_KEPT = 100_000
TRY_AGAIN_S, _TRY_AGAIN_MOST_S = 30.0, 600.0  # until an excluded engine is tried again; doubles each time
OTHERS_HAVE_S = 5.0  # for a version, once an engine was lost; three times the longest that one took, if that is more
MOST_ASKED = 8  # a prompt that crashes engines must not crash them all, again and again
_GONE = (EngineLost, EngineSilent)
# Attaching again can mend these, and nothing else: another trainer may have taken an engine over.
_CURABLE = (EngineError, SyncError)


@dataclass(eq=False, slots=True)
class _Member:
    engine: Engine
    name: str
    state: Literal["in", "out", "due", "joined"] = "in"
    life: int = 0
    """How often it was left out. Results from an earlier life say nothing about this one."""
    failures: int = 0
    """Failures since it last loaded a version."""
    took: int | None = None
    """The last version that it loaded."""
    asked: set[asyncio.Timeout] = field(default_factory=set[asyncio.Timeout])
    search: asyncio.Task[None] | None = None

    @property
    def is_new(self) -> bool:
        """True if the engine restarted without being noticed."""
        return self.took is not None and self.engine.version != self.took


class EnginePool:
    def __init__(self, engines: Sequence[Engine]) -> None:
        self._members = [_Member(engine, f"{n} of {len(engines)}") for n, engine in enumerate(engines, 1)]
        self._home: dict[str, _Member] = {}
        self._attached = self._closed = False
        self._came = asyncio.Event()
        """Set when an engine can be asked."""
        self._changed = asyncio.Event()
        """Set when the set of watched engines changed."""
        self._meet_again = asyncio.Event()
        """Set when the present engines differ from those that were attached."""
        self._load_s: float | None = None
        """The longest that a version took until all engines had it."""

    @property
    def version(self) -> int:
        """The oldest version that any engine serves."""
        return min(member.engine.version for member in self._those("in") or self._members)

    @property
    def receivers(self) -> int:
        return sum(member.engine.receivers for member in self._expected())

    @property
    def is_coming(self) -> bool:
        """True if no engine can sample now, but one is coming back."""
        engines = [member.engine for member in self._those("in")]
        if not engines:
            return self._attached
        return all(isinstance(engine, StartingEngine) and engine.is_coming for engine in engines)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        why = ""
        for _ in range(MOST_ASKED):
            member = await self._pick(session)
            life = member.life
            try:
                return await self._ask(member, prompt_ids, sampling, session=session, on_token=on_token)
            except _GONE as error:
                why = str(error)
                self._leave_out(member, life, error)
        raise EngineLost(f"pool: {MOST_ASKED} engines were lost while they answered this request; the last: {why}")

    def why_not(self, sampling: Sampling) -> str:
        """Return why one of the engines cannot sample so; empty if all can."""
        return next(filter(None, (why_not_sampled(member.engine, sampling) for member in self._members)), "")

    async def generate_each(self, prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Completion]:
        """Sample a completion from each engine that serves now; by engine name."""
        return await self._all(lambda member: self._ask(member, prompt_ids, sampling))

    async def _ask(self, member: _Member, prompt_ids: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        cut = asyncio.timeout(None)
        try:
            async with cut:
                member.asked.add(cut)
                try:
                    return await member.engine.generate(prompt_ids, sampling, **options)
                finally:
                    member.asked.discard(cut)  # before it ends: only a running one can be cut
        except TimeoutError:
            if not cut.expired():
                raise
            raise EngineLost(f"engine {member.name} was left out meanwhile") from None

    async def attach(self, source: WeightSource) -> None:
        """Attach all engines that `receivers` counted, or raise. Engines that failed are not counted for a while."""
        self._attached = True
        self._meet_again.clear()
        expected = self._expected()
        lives = [member.life for member in expected]
        ranks = [_Rank(source, sum(each.engine.receivers for each in expected[:n])) for n in range(len(expected))]
        attaching = (self._attach(member, rank) for member, rank in zip(expected, ranks, strict=True))
        with self._unsought(expected):
            errors = await asyncio.gather(*attaching, return_exceptions=True)
            for member, life, error in zip(expected, lives, errors, strict=True):
                if isinstance(error, _CURABLE):
                    self._leave_out(member, life, error)
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, _CURABLE)):
            raise error
        if odd := [member for member, life in zip(expected, lives, strict=True) if member.life != life]:
            raise EngineLost(f"pool: engine {odd[0].name} was lost while others were attached")
        for reply in (reply for rank in ranks for reply in rank.replies):
            source.attached(reply)

    async def _attach(self, member: _Member, source: WeightSource) -> None:
        """Attach one engine. A restarted engine gets no request until it has loaded a version."""
        life = member.life
        await member.engine.attach(source)
        if member.life == life and (member.state != "in" or member.is_new):
            self._move(member, "joined")

    async def load(self, version: int) -> Served:
        """Load a version on all engines. If some load it, leave out the others, so that all serve one version."""
        asked = [(member, member.life) for member in self._those("in", "joined")]
        if not asked:
            raise EngineLost("pool: no engine is left")
        loads = [asyncio.ensure_future(_load(member, version)) for member, _ in asked]
        began = asyncio.get_running_loop().time()
        try:
            await self._wait(loads)
        except asyncio.CancelledError:
            await _cancel(loads)
            self._settle(asked, loads)
            raise
        served, errors = self._settle(asked, loads)
        if not errors:
            self._load_s = max(self._load_s or 0.0, asyncio.get_running_loop().time() - began)
        for error in sorted(errors, key=lambda error: (isinstance(error, _CURABLE), not isinstance(error, _GONE))):
            if not served or not isinstance(error, _CURABLE):
                raise error
        if len({(each.version, *sorted(each.fingerprints.items())) for each in served}) > 1:
            for member, life in asked:
                self._leave_out(member, life, SyncError("engines hold different weights under one version"))
            raise SyncError(f"pool: asked for version {version}, and the engines hold different weights")
        self._came.set()
        return _merged(served)

    async def _wait(self, loads: Collection[asyncio.Future[Served]]) -> None:
        """Wait for all: an engine that still waited would receive the next version instead. If one is lost, the others
        have a while: some bridges give a version to all or to none, and would wait for the lost one."""
        waiting = set(loads)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            lost = any(isinstance(load.exception(), _GONE) for load in done if not load.cancelled())
            if lost and waiting and self._load_s is not None:
                _, waiting = await asyncio.wait(waiting, timeout=max(OTHERS_HAVE_S, 3 * self._load_s))
                await _cancel(waiting)
                return

    def _settle(
        self, asked: Collection[tuple[_Member, int]], loads: Sequence[asyncio.Future[Served]]
    ) -> tuple[list[Served], list[BaseException]]:
        """Engines that took the version serve it. If none did, the remaining ones keep the version that they had."""
        served, failed = list[Served](), list[tuple[_Member, int, BaseException]]()
        for (member, life), load in zip(asked, loads, strict=True):
            error = SyncError("it did not load the version in time") if load.cancelled() else load.exception()
            if error is None and member.life == life:
                served.append(load.result())
                member.failures, member.took = 0, load.result().version
                self._move(member, "in")
            else:
                failed.append((member, life, error or EngineLost("it was lost while it loaded a version")))
        for member, life, error in failed:
            if served or isinstance(error, _GONE):
                self._leave_out(member, life, error)
            elif member.state == "joined":
                self._move(member, "due")
        return served, [error for _, _, error in failed]

    async def sleep(self) -> None:
        await self._all(lambda member: member.engine.sleep())

    async def wake(self) -> None:
        await self._all(lambda member: member.engine.wake())

    async def lost(self) -> None:
        """Return when attaching again would help: an engine was lost, or a lost one came back."""
        while not self._meet_again.is_set():
            self._changed.clear()
            watched = [(member, member.life) for member in self._those("in", "joined")]
            watches = [asyncio.ensure_future(member.engine.lost()) for member, _ in watched]
            events = [asyncio.ensure_future(event.wait()) for event in (self._changed, self._meet_again)]
            try:
                await asyncio.wait([*watches, *events], return_when=asyncio.FIRST_COMPLETED)
                ended = [each for each, watch in zip(watched, watches, strict=True) if watch.done()]
            finally:
                for wait in (*watches, *events):
                    wait.cancel()
                await asyncio.gather(*watches, *events, return_exceptions=True)
            for member, life in ended:
                self._leave_out(member, life, EngineLost("it does not answer, or has restarted"))

    async def close(self) -> None:
        self._closed = True
        self._came.set()
        searches = [member.search for member in self._members if member.search is not None]
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self._members))

    # --- which engines serve

    def _those(self, *states: str) -> list[_Member]:
        return [member for member in self._members if member.state in states]

    def _expected(self) -> list[_Member]:
        """The engines of the next attach: all that are not out, or all of them if every one is out."""
        return self._those("in", "joined", "due") or self._members

    async def _pick(self, session: str | None) -> _Member:
        """A session stays where its prefix is cached; everything else goes to the least busy."""
        while not self._closed and not self._those("in"):
            self._came.clear()
            await self._came.wait()
        if self._closed:
            raise EngineError("engine: closed")
        home = self._home.get(session) if session else None
        if home is None or home.state != "in":
            home = min(self._those("in"), key=lambda member: len(member.asked))
        if session:
            self._home.pop(session, None)
            self._home[session] = home  # moves to the end: the least recently used session is forgotten first
            if len(self._home) > SESSIONS_KEPT:
                del self._home[next(iter(self._home))]
        return home

    def _move(self, member: _Member, state: Literal["in", "out", "due", "joined"]) -> None:
        if member.state != state:
            member.state = state
            self._changed.set()
        if state != "out" and member.search is not None and member.search is not asyncio.current_task():
            member.search.cancel()
            member.search = None

    def _leave_out(self, member: _Member, life: int, error: BaseException) -> None:
        if member.life != life or member.state == "out" or self._closed:
            return
        _log.warning("pool: engine %s is left out: %s", member.name, error)
        member.life += 1
        member.failures += 1
        self._move(member, "out")
        self._meet_again.set()
        now = asyncio.get_running_loop().time()
        for cut in member.asked:
            if not cut.expired():
                cut.reschedule(now)
        self._look_for(member, at_once=isinstance(error, _GONE))

    @contextmanager
    def _unsought(self, members: Sequence[_Member]) -> Generator[None]:
        """Stop searching for these engines while they are being attached."""
        for member in members:
            if member.search is not None:
                member.search.cancel()
                member.search = None
        try:
            yield
        finally:
            for member in members:
                if member.state == "out" and member.search is None and not self._closed:
                    self._look_for(member, at_once=True)

    def _look_for(self, member: _Member, *, at_once: bool) -> None:
        member.search = asyncio.create_task(self._search(member, at_once=at_once), name="pool search")

    async def _search(self, member: _Member, *, at_once: bool) -> None:
        """Wait until the engine may be tried again: until it is found, if it can look for its server."""
        engine = member.engine
        waits = member.failures - 1 if isinstance(engine, FindableEngine) and at_once else member.failures
        if waits:  # an engine that fails again and again would disturb the others each time
            await asyncio.sleep(min(TRY_AGAIN_S * 2 ** (waits - 1), _TRY_AGAIN_MOST_S))
        if isinstance(engine, FindableEngine):
            await engine.found()
        _log.info("pool: engine %s is tried again", member.name)
        if self._attached:
            self._move(member, "due")
            self._meet_again.set()
        else:  # without a publisher it keeps its version
            self._move(member, "in")
            self._came.set()

    async def _all(self, ask: Callable[[_Member], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """Ask each serving engine; return the answers by engine name. Leave out engines that are lost."""
        there = [(member, member.life) for member in self._those("in")]
        if not there:
            raise EngineLost("pool: no engine is left")
        said = await asyncio.gather(*(ask(member) for member, _ in there), return_exceptions=True)
        answers: dict[str, T] = {}
        for (member, life), answer in zip(there, said, strict=True):
            if isinstance(answer, _GONE):
                self._leave_out(member, life, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers[f"engine {member.name}"] = answer
        if not answers or not self._those("in"):
            raise EngineLost("pool: no engine is left")
        return answers


async def _cancel(loads: Collection[asyncio.Future[Served]]) -> None:
    for load in loads:
        load.cancel()
    await asyncio.gather(*loads, return_exceptions=True)


async def _load(member: _Member, version: int) -> Served:
    served = await member.engine.load(version)
    if served.version != version:
        raise SyncError(f"asked for version {version}, and it serves {served.version}")
    return served


def _merged(served: Sequence[Served]) -> Served:
    phases = dict.fromkeys(name for each in served for name in each.seconds)
    return Served(
        served[0].version,
        served[0].fingerprints,
        tuple(name for each in served for name in each.engines),
        min(each.cache_epoch for each in served),
        {name: max(each.seconds.get(name, 0.0) for each in served) for name in phases},
        all(each.read_back for each in served),
        lent_bytes=sum(each.lent_bytes for each in served),
    )


class _Rank(Relay):
    """One engine's part of a source that expects several receivers. It keeps the reply until all have replied."""

    def __init__(self, source: WeightSource, rank: int) -> None:
        super().__init__(source)
        self._rank = rank

    @property
    def link(self) -> Mapping[str, Any]:
        return {**self._source.link, "rank": self._rank} if self._source.link else {}

    def receive(self, version: int, rank: int = 0) -> Weights:
        return self._source.receive(version, self._rank + rank)
