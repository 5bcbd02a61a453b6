"""A version reaches the engine, and there is proof: or the version before goes on serving, and there is an error.

consumes: versions of the trainer      waits for: both ends of the bridge, and one canary prompt
produces: proofs                       within `deadline_s` an attempt

A proof has three parts. Fingerprints: both ends computed them apart, of every tensor in the form in which it is served,
and they are equal; where both ends are the same memory, they say which memory. The cache epoch: what was computed with
older weights is forgotten. The canary: a fixed prompt is continued through the very path that rollouts take, and the
trainer scores the same tokens; their logprobs lie within a band that was measured when the engine was fresh.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tandem.errors import EngineError, EngineLost, EngineSilent, LogprobGap, SyncError, SyncTimeout, TandemError
from tandem.ops.forwarding_source import Relay
from tandem.protocols import Engine, WeightBridge
from tandem.types import Completion, Fingerprints, Group, Proof, Sampling, Sent, Served, WeightKind, Weights

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_CHANCE = 4  # times the limit: who is further away than that is not asked again
_TURNS = 5  # of the event loop, until a request is out
_PROVEN_KEPT = 128  # more than the largest max_lag

Call: TypeAlias = Callable[..., Awaitable[Any]]
"""How to call what blocks: `asyncio.to_thread`, or `on_this_thread`."""


async def on_this_thread(function: Callable[..., Any], *args: Any) -> Any:
    """A `Call` on the event loop's own thread, where an inline engine runs too. One order of everything, and one team
    of OpenMP threads: two teams that take turns wait for each other by spinning, and halve the speed of both."""
    return function(*args)


class TrainerView(Protocol):
    """What publishing needs of a trainer."""

    @property
    def version(self) -> int: ...
    def export(self, kind: WeightKind) -> Weights: ...
    def score(self, ids: Sequence[int], first: int) -> list[float]: ...
    def base(self) -> Iterator[tuple[str, Tensor]]: ...
    def live_in(self, storage: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, slots=True)
class Canary:
    """A prompt that both sides are asked about after every flip."""

    prompt_ids: tuple[int, ...]
    floor: float
    """The least band, in nats: rounding of the served type moves logprobs by so much from one version to the next."""
    ceiling: float
    """A fresh engine that is further away than this does not compute what the trainer computes."""
    max_tokens: int = 2
    doubted_tokens: int = 2
    """A gap over the limit may be chance, of so few: so many decide."""
    times: float = 4.0
    """The band is so many times the gap of the fresh engine, or the floor if that is more."""


class Publisher:
    """Keeps one engine (or a pool) in step with one trainer.

    `lock` is held while weights are read, and by `resting` while they are written.
    """

    def __init__(
        self,
        bridge: WeightBridge,
        engine: Engine,
        *,
        deadline_s: float = 60.0,
        retries: int = 0,
        canary: Canary | None = None,
        call: Call = asyncio.to_thread,
        on_proof: Callable[[Proof], None] = lambda proof: None,
        on_meeting: Callable[[Mapping[str, Any]], None] = lambda meeting: None,
    ) -> None:
        """`retries`: how often a lost partner is taken back for one version. `on_proof` writes the ledger, `on_meeting`
        what the engines said of themselves."""
        self.lock = asyncio.Lock()
        self._bridge, self._engine = bridge, engine
        self._deadline_s, self._retries, self._canary = deadline_s, retries, canary
        self._call, self._on_proof, self._on_meeting = call, on_proof, on_meeting
        self._attached, self._meetings, self._single_copy = False, 0, False
        self._map: Mapping[str, Any] = {}
        self._engines: tuple[str, ...] = ()
        self._band, self._epoch = math.nan, -1
        self._said: list[int] = []
        self._proven: set[int] = set()
        self._serving = -1
        """The last version that was proven, while the engine is attached and awake with it."""

    async def publish(self, teacher: TrainerView) -> Proof:
        """Nothing is trained or sampled on a version without its proof."""
        async with self.lock:
            return await self._publish(teacher)

    async def hold(self, teacher: TrainerView) -> None:
        """As `publish`, unless that is what the engine serves."""
        async with self.lock:
            if not self._attached or not self._serving == teacher.version == self._engine.version:
                await self._publish(teacher)

    async def watch(self, teacher: TrainerView) -> None:
        """Attach the engine again whenever it is lost, with the trainer's version. Ends only by an error."""
        while True:
            meeting = self._meetings
            await self._engine.lost()
            if meeting == self._meetings:  # or else it was taken back already
                self._attached = False
                await self.publish(teacher)

    def state(self) -> dict[str, Any]:
        """Versions that groups which wait may hold."""
        return {"proven": sorted(self._proven)[-_PROVEN_KEPT:]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._proven.update(state["proven"])

    def check(self, groups: Sequence[Group]) -> None:
        """Refuse a batch with a token of a version that was not proven."""
        trajectories = [each for group in groups for each in group]
        versions = {version for each in trajectories for version in each.versions if version >= 0}
        if odd := next((each for each in trajectories if each.num_unstamped), None):
            raise SyncError(
                f"sync: a batch holds a sampled token of no version ({odd.task_id or 'no task'}): whatever engine made "
                "it had no weights of this trainer"
            )
        if missing := sorted(versions - self._proven):
            raise SyncError(
                f"sync: a batch holds tokens of version {missing[0]}, and nothing proves that an engine served it; "
                f"the last proofs are of {sorted(self._proven)[-3:]}"
            )

    @asynccontextmanager
    async def resting(self, teacher: TrainerView) -> AsyncIterator[None]:
        """The engine has lent what it shares with the trainer, and no lost engine is attached meanwhile: weights may be
        written. One that was lost is taken back when the next version is published; where both have one copy of the
        weights, before anything is written into what it may still serve."""
        async with self.lock:
            resting = await self._lend()
            if not resting and self._single_copy:
                await self._publish(teacher)
                if not await self._lend():
                    raise EngineLost("engine: lost twice in a row; it may go on serving what would be written into")
            yield

    async def rest(self, teacher: TrainerView) -> None:
        """The same, until the next version is published."""
        async with self.resting(teacher):
            pass

    async def go_on(self) -> None:
        await self._answered(self._engine.wake(), "wake")

    async def _lend(self) -> bool:
        self._serving = -1
        return await self._answered(self._engine.sleep(), "sleep")

    # --- one attempt

    async def _publish(self, teacher: TrainerView) -> Proof:
        self._serving = -1
        for attempt in range(1, self._retries + 2):
            try:
                proof = replace(await self._attempt(teacher), attempts=attempt)
            except (SyncError, EngineError) as error:
                self._attached = False
                if attempt > self._retries:
                    raise
                _log.warning("version %d, attempt %d: %s", teacher.version, attempt, error)
            else:
                self._proven.add(proof.version)
                self._serving = proof.version
                self._on_proof(proof)
                return proof
        raise AssertionError("every attempt returns or raises")

    async def _attempt(self, teacher: TrainerView) -> Proof:
        started = time.perf_counter()
        if not self._attached:  # how long it may take to start an engine is the engine's own deadline
            await self._attach(teacher)
        try:
            async with asyncio.timeout(self._deadline_s):
                sent, served = await self._meet(teacher.export(self._bridge.carries))
                self._tell_meeting({**self._map, "transport": sent.transport})
                self._compare(sent, served, teacher.version)
                proving = time.perf_counter()
                gap, tokens = await self._ask_canary(teacher, alone=not served.read_back)
        except TandemError:
            raise
        except TimeoutError:
            raise SyncTimeout(
                f"sync: version {teacher.version} did not reach the engine by {self._bridge.mode} within "
                f"sync.deadline_s = {self._deadline_s:g} s"
            ) from None
        now = time.perf_counter()
        return Proof(
            sent.version,
            sent.mode,
            sent.how if served.read_back else "canary",
            tensors=len(sent.fingerprints),
            bytes_moved=sent.bytes_moved,
            seconds={**sent.seconds, **served.seconds, "canary": now - proving, "total": now - started},
            digest=_all_in_one(sent),
            engines=served.engines,
            cache_epoch=served.cache_epoch,
            logprob_gap=gap,
            gap_limit=self._band if tokens else 0.0,
            canary_tokens=tokens,
            transport=sent.transport,
            lent_bytes=served.lent_bytes,
        )

    async def _attach(self, teacher: TrainerView) -> None:
        from tandem.ops.adapter_base_check import check_base  # brings torch, which a wrong spec need not wait for

        heard = _Heard(self._bridge.source(self._engine.receivers))
        await self._engine.attach(heard)
        storage = self._bridge.storage()
        self._single_copy = storage is not None
        if storage is not None:
            await self._call(teacher.live_in, storage)
        await self._call(check_base, teacher.base(), heard.replies)
        self._tell_meeting({"mode": self._bridge.mode, "engines": heard.replies, "transport": {}})
        self._attached, self._meetings = True, self._meetings + 1

    def _tell_meeting(self, map: Mapping[str, Any]) -> None:
        """Which way versions come is known once the first one has."""
        if map != self._map:
            self._map = map
            self._on_meeting(map)

    async def _meet(self, weights: Weights) -> tuple[Sent, Served]:
        def send() -> asyncio.Future[Sent]:
            return asyncio.ensure_future(self._call(self._bridge.send, weights))

        def load() -> asyncio.Future[Served]:
            return asyncio.ensure_future(self._engine.load(weights.version))

        loading: asyncio.Future[Served] | None = None
        try:
            if self._call is on_this_thread:  # an inline engine finds it there
                sending = send()
                await asyncio.sleep(0)
                if sending.done():
                    sending.result()  # refused: nothing will come that could be loaded
                loading = load()
            else:  # the question first: a thread that packs leaves the interpreter to this one every few milliseconds
                loading = load()
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                if loading.done():
                    loading.result()  # refused: no receiver would take what is sent
                sending = send()
            return await asyncio.gather(sending, loading)
        finally:
            if loading is not None:
                loading.cancel()  # when the other end broke, nothing will come any more
                await asyncio.gather(loading, return_exceptions=True)

    def _compare(self, sent: Sent, served: Served, version: int) -> None:
        if not sent.version == served.version == self._engine.version == version:
            raise SyncError(
                f"sync: sent version {sent.version}, the engine proves {served.version} and serves "
                f"{self._engine.version}"
            )
        if dict(sent.fingerprints) != dict(served.fingerprints):
            raise SyncError(f"sync: version {version}: {_difference(sent.fingerprints, served.fingerprints)}")
        if not served.read_back and self._canary is None:
            raise SyncError(
                f"sync: version {version}: the engine's memory cannot be read and there is no canary: nothing proves "
                "what it serves"
            )
        if served.engines != self._engines:
            self._engines, self._epoch, self._band = served.engines, -1, math.nan
        if served.fingerprints and served.cache_epoch <= self._epoch:
            raise SyncError(
                f"sync: version {version}: the engine's cache epoch is still {served.cache_epoch}: keys and values of "
                "older weights may be in use"
            )
        self._epoch = served.cache_epoch

    async def _ask_canary(self, teacher: TrainerView, *, alone: bool) -> tuple[float, int]:
        """The gap, and over how many tokens. `alone`: nothing else proves what is served, and the first answer counts,
        which later tokens that anybody would be sure of must not make up for."""
        canary = self._canary
        if canary is None:
            return 0.0, 0
        name, gap, tokens = await self._ask(
            teacher, canary.prompt_ids, canary.max_tokens, self._said[: canary.max_tokens]
        )
        limit = canary.ceiling if math.isnan(self._band) else self._band
        if limit < gap <= _CHANCE * limit and not alone and canary.doubted_tokens > canary.max_tokens:
            few, (name, gap, tokens) = gap, await self._ask(teacher, canary.prompt_ids, canary.doubted_tokens)
            _log.warning("version %d: gap %.4f of few tokens, %.4f of %d", teacher.version, few, gap, tokens)
        if not gap <= limit:
            raise LogprobGap(
                f"sync: version {teacher.version}: trainer and {name or 'engine'} differ by {gap:.4f} nats a token "
                f"about a fixed prompt, and the limit is {limit:.4f}: equal weights, and yet another model is "
                "computed, or keys and values of older weights are in use; see docs/troubleshooting.md"
            )
        if math.isnan(self._band):  # not of a refused gap: asking again would then pass
            self._band = max(canary.floor, canary.times * gap)
        return gap, tokens

    async def _ask(
        self, teacher: TrainerView, prompt_ids: Sequence[int], most: int, guess: Sequence[int] = ()
    ) -> tuple[str, float, int]:
        """Which engine is furthest from the trainer, how far, and over how many tokens of all of them. `guess`: what it
        may say."""
        prompt, ours = list(prompt_ids), list[float]()
        asked = asyncio.ensure_future(self._say(prompt, Sampling(max_tokens=most, temperature=0.0, urgent=True)))
        try:
            if guess and self._call is not on_this_thread:
                # Most answers are the last version's. The engine computes elsewhere: score that meanwhile.
                await asyncio.sleep(0)
                ours = await self._call(teacher.score, [*prompt, *guess], len(prompt))
            answers = await asked
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        said = {version for answer in answers.values() for version in answer.versions}
        if said != {teacher.version}:
            raise SyncError(f"sync: version {teacher.version} is loaded, and the engine answers with {sorted(said)}")
        scored, gaps = {tuple(guess): ours}, dict[str, float]()
        for name, answer in answers.items():
            ids = tuple(answer.ids)
            if not scored.get(ids):
                scored[ids] = await self._call(teacher.score, [*prompt, *ids], len(prompt))
            gaps[name] = sum(abs(a - b) for a, b in zip(scored[ids], answer.logprobs, strict=True)) / len(ids)
            self._said = answer.ids
        name, gap = max(gaps.items(), key=lambda each: (math.isnan(each[1]), each[1]))
        return name, gap, sum(len(answer.ids) for answer in answers.values())

    async def _say(self, prompt: list[int], sampling: Sampling) -> Mapping[str, Completion]:
        """Each engine of a pool, by name: one whose weights are right may still compute another model."""
        each: Callable[..., Awaitable[Mapping[str, Completion]]] | None = getattr(self._engine, "generate_each", None)
        return await each(prompt, sampling) if each else {"": await self._engine.generate(prompt, sampling)}

    async def _answered(self, call: Awaitable[None], what: str) -> bool:
        """False: it is lost, and may be taken back."""
        try:
            async with asyncio.timeout(self._deadline_s):
                await call
        except EngineLost:
            self._attached = False
            if not self._retries:
                raise
            return False
        except TandemError:
            raise
        except TimeoutError:
            raise EngineSilent(
                f"engine: no answer to {what}() within sync.deadline_s = {self._deadline_s:g} s"
            ) from None
        return True


class _Heard(Relay):
    """A source that remembers what the engines said to it."""

    def attached(self, reply: Mapping[str, Any]) -> None:
        self._source.attached(reply)
        super().attached(reply)


def _difference(sent: Fingerprints, served: Fingerprints) -> str:
    names = sent.keys() | served.keys()
    if odd := sorted(sent.keys() ^ served.keys()):
        return f"{len(odd)} of {len(names)} tensors are on one side only, as '{odd[0]}'"
    odd = sorted(name for name in names if sent[name] != served[name])
    return f"the engine serves another '{odd[0]}' than was sent ({len(odd)} of {len(names)} tensors differ)"


def _all_in_one(sent: Sent) -> str:
    """One number for all fingerprints, as people compare it."""
    text = "\n".join(f"{name} {fingerprint}" for name, fingerprint in sorted(sent.fingerprints.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest() if text else ""
