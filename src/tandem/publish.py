"""Publish a version to the engine and prove that it is served; otherwise the old version stays, with an error.

consumes: versions of the trainer      waits for: both ends of the bridge, and canary prompts
produces: proofs                       within `deadline_s` for the weights, and again for each prompt

A proof has three parts. Fingerprints: both ends compute them separately, of every tensor in the form in which it is
served, and they are equal; if both ends share one memory, the fingerprints say which memory. The cache epoch: the
engine has dropped keys and values of older weights. The canary: the engine continues a fixed prompt as it does for
rollouts, and the trainer scores the same tokens; the logprobs differ by less than a limit measured when the engine was
fresh.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tandem.errors import EngineError, EngineLost, EngineSilent, LogprobGap, SyncError, SyncTimeout, TandemError
from tandem.ops.forwarding_source import Relay
from tandem.protocols import Engine, WeightBridge, generate_each
from tandem.types import Fingerprints, Group, Proof, Sampling, Sent, Served, WeightKind, Weights

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_CHANCE = 4  # no second canary if the gap exceeds this multiple of the limit
_TURNS = 5  # of the event loop, until a request is sent
_PROVEN_KEPT = 128  # more than the largest max_lag

Call: TypeAlias = Callable[..., Awaitable[Any]]
"""How to call a blocking function: `asyncio.to_thread`, or `on_this_thread`."""


async def on_this_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call on the event loop's own thread, where an inline engine runs too. This gives one order of all work, and one
    team of OpenMP threads: two teams that take turns spin while they wait, and both run at half speed."""
    return function(*args)


class TrainerView(Protocol):
    """The part of a trainer that publishing uses."""

    @property
    def version(self) -> int: ...
    def export(self, kind: WeightKind) -> Weights: ...
    def score(self, ids: Sequence[int], first: int) -> list[float]: ...
    def base(self) -> Iterator[tuple[str, Tensor]]: ...
    def live_in(self, storage: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, slots=True)
class Canary:
    """Prompts that engine and trainer both compute: the first after every new version, all of them where few tokens do
    not decide."""

    prompt_ids: tuple[int, ...]
    floor: float
    """The smallest limit, in nats: rounding of the served type alone moves logprobs by this much between versions."""
    ceiling: float
    """The limit for a fresh engine, in nats: above it the engine does not compute what the trainer computes."""
    max_tokens: int = 2
    doubted_tokens: int = 2
    """A gap above the limit may be chance with few tokens; then answers of this many tokens to all prompts decide."""
    times: float = 4.0
    """The limit is this multiple of the fresh engine's gap, or the floor if that is more."""
    more_prompts: tuple[tuple[int, ...], ...] = ()
    """Asked together with the first where many tokens decide: of a fresh engine, whose gap sets the limit, and in
    doubt."""


class Publisher:
    """Publishes the versions of one trainer to one engine or pool.

    `lock` is held while weights are read, and in `resting` while they are written.
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
        on_attached: Callable[[Mapping[str, Any]], None] = lambda attachment: None,
    ) -> None:
        """`retries`: how often a lost engine is attached again for one version. `on_proof` writes the ledger;
        `on_attached` writes the replies of attached engines."""
        self.lock = asyncio.Lock()
        self._bridge, self._engine = bridge, engine
        self._deadline_s, self._retries, self._canary = deadline_s, retries, canary
        self._call, self._on_proof, self._on_attached = call, on_proof, on_attached
        self._attached, self._num_attached, self._single_copy = False, 0, False
        self._attachment: Mapping[str, Any] = {}
        self._engines: tuple[str, ...] = ()
        self._limit, self._epoch = math.nan, -1
        self._last_answer: list[int] = []
        self._proven: set[int] = set()
        self._serving = -1
        """The last version that was proven, while the engine is attached and awake with it."""

    async def publish(self, trainer: TrainerView) -> Proof:
        """Publish the trainer's version and return its proof. No version is sampled or trained on without one."""
        async with self.lock:
            return await self._publish(trainer)

    async def ensure_served(self, trainer: TrainerView) -> None:
        """Publish, unless the engine serves the trainer's version already."""
        async with self.lock:
            if not self._attached or not self._serving == trainer.version == self._engine.version:
                await self._publish(trainer)

    async def watch(self, trainer: TrainerView) -> None:
        """Attach the engine again whenever it is lost, with the trainer's present version. Run until an error."""
        while True:
            before = self._num_attached
            await self._engine.lost()
            if before == self._num_attached:  # otherwise it is attached again already
                self._attached = False
                await self.publish(trainer)

    def state(self) -> dict[str, Any]:
        """Return the proven versions, which waiting groups may have tokens of."""
        return {"proven": sorted(self._proven)[-_PROVEN_KEPT:]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._proven.update(state["proven"])

    def check(self, groups: Sequence[Group], oldest: float = 0) -> None:
        """Refuse a batch with a token of a version that has no proof, or one before `oldest`: an engine that lost its
        weights goes back to the first ones, which were proven once."""
        trajectories = [each for group in groups for each in group]
        versions = {version for each in trajectories for version in each.versions if version >= 0}
        if odd := next((each for each in trajectories if each.num_unstamped), None):
            raise SyncError(
                f"sync: a batch holds a sampled token of no version ({odd.task_id or 'no task'}): its engine "
                "had no weights of this trainer"
            )
        if missing := sorted(versions - self._proven):
            raise SyncError(
                f"sync: a batch holds tokens of version {missing[0]}, and nothing proves that an engine served it; "
                f"the last proofs are of {sorted(self._proven)[-3:]}"
            )
        if versions and min(versions) < oldest:
            raise SyncError(
                f"sync: a batch holds tokens of version {min(versions)}; train.max_lag allows none before {oldest}: "
                "old weights were served, or groups came out of order"
            )

    @asynccontextmanager
    async def resting(self, trainer: TrainerView) -> AsyncIterator[None]:
        """Put the engine to sleep while the caller writes weights; no lost engine is attached meanwhile. A lost engine
        is attached again when the next version is published. If engine and trainer share one copy of the weights, it is
        attached again first: it may still serve the memory that the caller is about to write."""
        async with self.lock:
            asleep = await self._put_to_sleep()
            if not asleep and self._single_copy:
                await self._publish(trainer)
                if not await self._put_to_sleep():
                    raise EngineLost(
                        "engine: lost twice in a row; it may still serve the memory that the trainer would write"
                    )
            yield

    async def rest(self, trainer: TrainerView) -> None:
        """Put the engine to sleep until the next version is published. For callers that do not run `watch`."""
        async with self.resting(trainer):
            pass

    async def go_on(self) -> None:
        await self._call_engine(self._engine.wake(), "wake")

    async def _put_to_sleep(self) -> bool:
        self._serving = -1
        return await self._call_engine(self._engine.sleep(), "sleep")

    # --- one attempt

    async def _publish(self, trainer: TrainerView) -> Proof:
        self._serving = -1
        for attempt in range(1, self._retries + 2):
            try:
                proof = replace(await self._attempt(trainer), attempts=attempt)
            except (SyncError, EngineError) as error:
                self._attached = False
                if attempt > self._retries:
                    raise
                _log.warning("version %d, attempt %d: %s", trainer.version, attempt, error)
            else:
                self._proven.add(proof.version)
                self._serving = proof.version
                self._on_proof(proof)
                return proof
        raise AssertionError("every attempt returns or raises")

    async def _attempt(self, trainer: TrainerView) -> Proof:
        started = time.perf_counter()
        if not self._attached:  # starting an engine has its own deadline
            await self._attach(trainer)
        async with self._deadline(f"version {trainer.version} did not reach the engine by {self._bridge.mode}"):
            sent, served = await self._transfer(trainer.export(self._bridge.carries))
        self._report_attached({**self._attachment, "transport": sent.transport})
        self._compare(sent, served, trainer.version)
        proving = time.perf_counter()
        gap, tokens = await self._ask_canary(trainer, alone=not served.read_back)
        now = time.perf_counter()
        return Proof(
            sent.version,
            sent.mode,
            sent.how if served.read_back else "canary",
            tensors=len(sent.fingerprints),
            bytes_moved=sent.bytes_moved,
            seconds={**sent.seconds, **served.seconds, "canary": now - proving, "total": now - started},
            digest=_combined_digest(sent),
            engines=served.engines,
            cache_epoch=served.cache_epoch,
            logprob_gap=gap,
            gap_limit=self._limit if tokens else 0.0,
            canary_tokens=tokens,
            transport=sent.transport,
            lent_bytes=served.lent_bytes,
        )

    @asynccontextmanager
    async def _deadline(self, missed: str) -> AsyncIterator[None]:
        """Raise SyncTimeout with the text `missed` if the deadline passes."""
        try:
            async with asyncio.timeout(self._deadline_s):
                yield
        except TandemError:
            raise
        except TimeoutError:
            raise SyncTimeout(f"sync: {missed} within sync.deadline_s = {self._deadline_s:g} s") from None

    async def _attach(self, trainer: TrainerView) -> None:
        from tandem.ops.adapter_base_check import check_base  # imports torch; a wrong spec is refused before that

        source = _RecordingSource(self._bridge.source(self._engine.receivers))
        await self._engine.attach(source)
        storage = self._bridge.storage()
        self._single_copy = storage is not None
        if storage is not None:
            await self._call(trainer.live_in, storage)
        await self._call(check_base, trainer.base(), source.replies)
        self._report_attached({"mode": self._bridge.mode, "engines": source.replies, "transport": {}})
        self._attached, self._num_attached = True, self._num_attached + 1

    def _report_attached(self, attachment: Mapping[str, Any]) -> None:
        """Report the replies of engines, again when they change: the transport is known after the first version."""
        if attachment != self._attachment:
            self._attachment = attachment
            self._on_attached(attachment)

    async def _transfer(self, weights: Weights) -> tuple[Sent, Served]:
        def send() -> asyncio.Future[Sent]:
            return asyncio.ensure_future(self._call(self._bridge.send, weights))

        def load() -> asyncio.Future[Served]:
            return asyncio.ensure_future(self._engine.load(weights.version))

        loading: asyncio.Future[Served] | None = None
        try:
            if self._call is on_this_thread:  # an inline engine looks for weights that were sent before
                sending = send()
                await asyncio.sleep(0)
                if sending.done():
                    sending.result()  # refused: there will be nothing to load
                loading = load()
            else:  # ask the engine first: a packing thread yields the interpreter only every few milliseconds
                loading = load()
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                if loading.done():
                    loading.result()  # refused: no engine would take the version
                sending = send()
            return await asyncio.gather(sending, loading)
        finally:
            if loading is not None:
                loading.cancel()  # after an error of the sender, nothing will come
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
            self._engines, self._epoch, self._limit = served.engines, -1, math.nan
        if served.fingerprints and served.cache_epoch <= self._epoch:
            raise SyncError(
                f"sync: version {version}: the engine's cache epoch is still {served.cache_epoch}: keys and values of "
                "older weights may be in use"
            )
        self._epoch = served.cache_epoch

    async def _ask_canary(self, trainer: TrainerView, *, alone: bool) -> tuple[float, int]:
        """Return the gap, and over how many tokens. A fresh engine answers all prompts, so that the limit comes from
        enough tokens. `alone`: nothing else proves what is served, so the first answer counts: a longer answer could
        hide its gap among easy tokens."""
        canary = self._canary
        if canary is None:
            return 0.0, 0
        fresh = math.isnan(self._limit)
        limit = canary.ceiling if fresh else self._limit
        first, every = (canary.prompt_ids,), (canary.prompt_ids, *canary.more_prompts)
        has_more = canary.doubted_tokens > canary.max_tokens or len(every) > 1
        if fresh:
            name, gap, tokens = await self._ask(trainer, every, canary.doubted_tokens)
        else:
            guess = self._last_answer[: canary.max_tokens]
            name, gap, tokens = await self._ask(trainer, first, canary.max_tokens, guess)
            if limit < gap <= _CHANCE * limit and not alone and has_more:
                few, (name, gap, tokens) = gap, await self._ask(trainer, every, canary.doubted_tokens)
                _log.warning("version %d: gap %.4f of few tokens, %.4f of %d", trainer.version, few, gap, tokens)
        if not gap <= limit:
            raise LogprobGap(
                f"sync: version {trainer.version}: trainer and {name or 'engine'} differ by {gap:.4f} nats a token "
                f"about a fixed prompt ({tokens} tokens), and the limit is {limit:.4f}: equal weights, and yet another "
                "model is computed, or keys and values of older weights are in use; see docs/troubleshooting.md"
            )
        if fresh:  # only after an accepted gap: else a refused engine would be accepted at the next attempt
            self._limit = max(canary.floor, canary.times * gap)
        return gap, tokens

    async def _ask(
        self, trainer: TrainerView, prompts: Sequence[Sequence[int]], max_tokens: int, guess: Sequence[int] = ()
    ) -> tuple[str, float, int]:
        """Return which engine is furthest from the trainer, how far over all its tokens, and the tokens of all engines.
        One prompt after the other: an urgent request has one place. Each has the deadline for itself: on a busy machine
        all prompts of a fresh engine together may take longer. `guess`: the likely answer to the first prompt."""
        gaps: defaultdict[str, list[float]] = defaultdict(list)
        for number, prompt in enumerate(prompts):
            async with self._deadline(f"version {trainer.version}: the canary's prompt was not answered and scored"):
                found = await self._gaps(trainer, list(prompt), max_tokens, guess, number == 0)
            for name, of_tokens in found.items():
                gaps[name] += of_tokens
            guess = ()
        means = {name: sum(each) / len(each) for name, each in gaps.items()}
        name = max(means, key=lambda each: (math.isnan(means[each]), means[each]))
        return name, means[name], sum(map(len, gaps.values()))

    async def _gaps(
        self, trainer: TrainerView, prompt: list[int], max_tokens: int, guess: Sequence[int], remember: bool
    ) -> dict[str, list[float]]:
        """Return how far each engine is from the trainer, at each token of its answer to one prompt."""
        ours = list[float]()
        asked = asyncio.ensure_future(
            # Each engine of a pool: one with the right weights may still compute another model.
            generate_each(self._engine, prompt, Sampling(max_tokens=max_tokens, temperature=0.0, urgent=True))
        )
        try:
            if guess and self._call is not on_this_thread:
                # Most answers equal those of the last version. Score that one while the engine computes.
                await asyncio.sleep(0)
                ours = await self._call(trainer.score, [*prompt, *guess], len(prompt))
            answers = await asked
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        versions = {version for answer in answers.values() for version in answer.versions}
        if versions != {trainer.version}:
            raise SyncError(
                f"sync: version {trainer.version} is loaded, and the engine answers with {sorted(versions)}"
            )
        scored, gaps = {tuple(guess): ours}, dict[str, list[float]]()
        for name, answer in answers.items():
            ids = tuple(answer.ids)
            if not scored.get(ids):
                scored[ids] = await self._call(trainer.score, [*prompt, *ids], len(prompt))
            gaps[name] = [abs(a - b) for a, b in zip(scored[ids], answer.logprobs, strict=True)]
            if remember:
                self._last_answer = answer.ids
        return gaps

    async def _call_engine(self, call: Awaitable[None], what: str) -> bool:
        """Await a call of the engine. Return False if the engine is lost and may be attached again."""
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


class _RecordingSource(Relay):
    """A source that records the replies of engines."""

    def attached(self, reply: Mapping[str, Any]) -> None:
        self._source.attached(reply)
        super().attached(reply)


def _difference(sent: Fingerprints, served: Fingerprints) -> str:
    names = sent.keys() | served.keys()
    if odd := sorted(sent.keys() ^ served.keys()):
        return f"{len(odd)} of {len(names)} tensors are on one side only, as '{odd[0]}'"
    odd = sorted(name for name in names if sent[name] != served[name])
    return f"the engine serves another '{odd[0]}' than was sent ({len(odd)} of {len(names)} tensors differ)"


def _combined_digest(sent: Sent) -> str:
    """Return one digest of all fingerprints, for people to compare."""
    text = "\n".join(f"{name} {fingerprint}" for name, fingerprint in sorted(sent.fingerprints.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest() if text else ""
