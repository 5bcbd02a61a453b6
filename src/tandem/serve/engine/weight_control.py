"""Decide which trainer may change an engine's weights, how long it may pause the engine, and whether weights are torn.

consumes: attach, load, sleep, wake, one at a time        waits for: the engine's end of a bridge, within a deadline
produces: an Engine that refuses what it cannot answer    a pause ends when its lease does

- Only the trainer that attached last may change the weights. Requests of an earlier one are refused, and cancelled if
  they are running.
- A pause without wake, load or renewal ends, and the engine serves the old version again. An engine that freed its
  memory and finds it taken tries again until it is free. If the trainer writes into this engine's memory, that memory
  is first compared with its content at the start of the pause. If it has changed, the engine answers nothing until a
  load succeeds: it never serves torn weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from tandem.errors import EngineError, EngineLost, SyncError, SyncTimeout, TandemError
from tandem.io.engine_messages import FENCED
from tandem.io.finish_anyway import to_its_end
from tandem.io.process_identity import is_there
from tandem.protocols import Engine, OnToken, why_not_sampled
from tandem.serve.engine.link_rules import Allowed
from tandem.serve.http.refusals import RequestRefused
from tandem.types import Completion, Fingerprints, Sampling, Served
from tandem.vllm_worker.weight_sources import EngineEnd

_log = logging.getLogger(__name__)

WAKE_AGAIN_S = 2.0

State: TypeAlias = Literal["empty", "serving", "paused", "torn", "dead"]


class LocalEngine(Engine, Protocol):
    """An engine whose memory this process can read."""

    @property
    def boot_id(self) -> str: ...
    @property
    def cache_epoch(self) -> int: ...
    @property
    def lent_bytes(self) -> int: ...  # freed by sleep(), taken back by wake() or load(); above 0: asleep
    @property
    def why_torn(self) -> str: ...  # empty, or why it refuses requests until a full version is loaded
    @property
    def stays(self) -> bool: ...  # its weights never move: a trainer that mapped them can always write there
    async def fingerprints(self) -> Fingerprints: ...  # computes digests of the served weights now
    async def remember(self) -> None: ...  # records its memory before a trainer writes into it
    async def intact(self) -> bool: ...  # whether its memory is unchanged since remember()


OpenSource: TypeAlias = Callable[[Mapping[str, Any]], EngineEnd]
"""Opens the engine's end of a bridge from its link. May block."""


@dataclass(frozen=True)
class WeightCaller:
    """The sender of a request about weights: its attachment, and the engine process that it attached to."""

    attachment: int
    boot_id: str


@dataclass
class _Pause:
    until: float
    lease_s: float
    writing: bool = False
    asleep: bool = False
    expiry: asyncio.Task[None] | None = None


class WeightControl:
    """An engine whose weights one attached trainer may change; it is an Engine itself for samplers."""

    def __init__(self, engine: LocalEngine, open_source: OpenSource, allowed: Allowed) -> None:
        self._engine, self._open_source, self._allowed = engine, open_source, allowed
        self._owner, self._replaced, self._writer = "", set[str](), ""
        self._attachment = self._attachments = 0
        self._source: EngineEnd | None = None
        self._mapping: dict[str, Any] = {}
        self._pause: _Pause | None = None
        self._abandoned = False  # by a trainer that may still write: it must attach again
        self._torn = self._dead = ""
        self._turn = asyncio.Lock()
        self._loading: asyncio.Task[Any] | None = None
        self._running: set[asyncio.Task[Completion]] = set()
        self._watch: asyncio.Task[None] | None = None

    # --- for samplers

    @property
    def version(self) -> int:
        return self._engine.version

    def why_not(self, sampling: Sampling) -> str:
        return why_not_sampled(self._engine, sampling)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        self._refuse_if_unfit()
        held: list[tuple[int, float, int]] = []

        def tell(*token: Any) -> None:
            if on_token is None:
                return
            if held or self._abandoned:
                held.append(token)
            else:
                on_token(*token)

        answer = asyncio.ensure_future(self._engine.generate(prompt_ids, sampling, session=session, on_token=tell))
        self._running.add(answer)
        try:
            completion = await answer
            await self._check_untouched()
            if on_token is not None:
                for token in held:
                    on_token(*token)
            return completion
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if answer.cancelled() and self.why_torn and not (task and task.cancelling()):
                raise EngineLost(self.why_torn) from None
            raise
        finally:
            self._running.discard(answer)

    @property
    def state(self) -> State:
        if self._dead:
            return "dead"
        if self.why_torn:
            return "torn"
        if self._pause is not None:
            return "paused"
        return "empty" if self.version < 0 else "serving"

    @property
    def why_torn(self) -> str:
        return self._torn or self._engine.why_torn

    def why_unfit(self) -> str:
        """Return why the engine cannot answer; empty if it can, or will without help."""
        self._watch_engine()
        return self._dead or self.why_torn

    def status(self) -> dict[str, Any]:
        self._watch_engine()
        left_s = None if self._pause is None else max(0.0, self._pause.until - asyncio.get_running_loop().time())
        return {
            "boot_id": self._engine.boot_id,
            "version": self.version,
            "state": self.state,
            "why": self._dead or self.why_torn,
            "lease_left_s": left_s,
            "attachment": self._attachment,
            "workers": self._engine.receivers,
            "cache_epoch": self._engine.cache_epoch,
            "lent_bytes": self._engine.lent_bytes,
            "running": len(self._running),
            "mapping": self._mapping,
        }

    def check_boot(self, boot_id: str) -> None:
        if boot_id != self._engine.boot_id:
            text = "engine: it has restarted since you attached; attach again"
            raise RequestRefused(409, text, field="boot_id", code="engine_lost")

    def _refuse_if_unfit(self) -> None:
        self._watch_engine()
        if self.why_torn:
            raise EngineLost(self.why_torn)
        if self.state == "empty":
            raise EngineError("engine: it has no weights yet; a trainer must load a version first")

    # --- for the trainer

    async def attach(
        self, link: Mapping[str, Any], *, lease_s: float, writing: bool, owner: str = "", process: str = ""
    ) -> dict[str, Any]:
        """Make the caller the only trainer that may change the weights. `writing`: the trainer will write into this
        engine's memory at once, so the engine stays paused. `owner`, `process`: identify the trainer. A trainer that
        was replaced is refused for good: it may have been stopped and not know that another one took over."""
        self._allowed.check(link)
        if owner in self._replaced:
            raise _fenced()
        self._check_writer(process)
        self._attachments += 1
        caller = WeightCaller(self._attachments, self._engine.boot_id)
        source = await self._open(link)  # first: an unreachable trainer must not replace a reachable one
        try:
            if caller.attachment < self._attachment:
                raise _fenced()
            if self._owner and owner != self._owner:
                self._replaced.add(self._owner)
            self._owner = owner
            self._attachment = caller.attachment
            if self._loading is not None:
                self._loading.cancel()
            async with self._turn:
                self._check_attachment(caller)
                await self._look_if_abandoned()
                self._abandoned = False
                await self._change_source(source)
                layout = source.reply.get("layout", {})
                self._mapping = {"mode": link["mode"], "carries": source.carries, "tensors": len(layout)}
                if writing:
                    self._writer = process
                    await self._begin_pause(lease_s, writing=True)
        except BaseException:
            if source is not self._source:
                source.close()
            raise
        return {**source.reply, "attachment": caller.attachment}

    def _check_writer(self, process: str) -> None:
        if self._engine.stays and self._writer not in ("", process) and is_there(self._writer):
            raise SyncError(
                f"engine: process {self._writer.partition(':')[0]} of an earlier trainer still runs and can write into "
                "the served memory; end it first"
            )

    async def _change_source(self, source: EngineEnd) -> None:
        if self._pause is not None:
            await self._end_pause("another trainer has attached")
        if self._source is not None:
            self._source.close()
            self._source, self._mapping = None, {}
        await self._engine.attach(source)
        self._source = source

    async def load(self, caller: WeightCaller, version: int, deadline_s: float) -> Served:
        async with self._turn_of(caller):
            carries = "" if self._source is None else self._source.carries
            if self.why_torn and carries == "adapter":
                raise SyncError(f"{self.why_torn}; an adapter cannot repair its base")
            self._loading = asyncio.ensure_future(self._load(version, deadline_s))
            try:
                served = await to_its_end(self._loading, given_up=self._cut_short)
            except asyncio.CancelledError:
                if caller.attachment != self._attachment:
                    raise _fenced() from None
                raise
            finally:
                self._loading = None
            self._drop_pause()
            self._torn = ""
            return served

    async def _load(self, version: int, deadline_s: float) -> Served:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._engine.load(version)
        except BaseException as error:
            self._loading = None  # from here on it must not be cancelled
            # At once: the engine is awake, and the trainer may have written into it.
            await self._after_failed_load()
            if isinstance(error, TimeoutError) and not isinstance(error, TandemError):
                raise SyncTimeout(f"engine: version {version} was not loaded within {deadline_s:g} s") from None
            raise

    def _cut_short(self, load: asyncio.Future[Served]) -> None:
        if load is self._loading:
            load.cancel()

    async def sleep(self, caller: WeightCaller, *, lease_s: float, writing: bool) -> dict[str, int]:
        """Pause the engine, or renew the lease of the pause."""
        async with self._turn_of(caller):
            await self._begin_pause(lease_s, writing=writing)
            return {"lent_bytes": self._engine.lent_bytes}

    async def wake(self, caller: WeightCaller) -> None:
        async with self._turn_of(caller):
            if self._pause is None:
                return
            await self._end_pause("the trainer woke it")
            if self.why_torn:
                raise SyncError(self.why_torn)

    async def digest(self, version: int) -> Served:
        async with self._turn:
            if version != self.version:
                raise SyncError(f"engine: asked for version {version}, serving {self.version}")
            found = await self._engine.fingerprints()
            return Served(version, found, (self._engine.boot_id,), self._engine.cache_epoch)

    async def close(self) -> None:
        self._drop_pause()
        if self._watch is not None:
            self._watch.cancel()
        if self._source is not None:
            self._source.close()
        await self._engine.close()

    # --- turns

    @asynccontextmanager
    async def _turn_of(self, caller: WeightCaller) -> AsyncIterator[None]:
        self._check(caller)
        async with self._turn:
            self._check(caller)  # another trainer may have attached while it waited
            yield

    def _check(self, caller: WeightCaller) -> None:
        self._check_attachment(caller)
        if self._abandoned:
            raise RequestRefused(
                409, "engine: your pause ran out; attach again", field="attachment", code="engine_lost"
            )

    def _check_attachment(self, caller: WeightCaller) -> None:
        self.check_boot(caller.boot_id)
        if caller.attachment > self._attachment:
            raise RequestRefused(422, f"there was no attachment {caller.attachment}", field="attachment")
        if caller.attachment < self._attachment:
            raise _fenced()

    async def _open(self, link: Mapping[str, Any]) -> EngineEnd:
        try:
            return await asyncio.to_thread(self._open_source, link)
        except TandemError:
            raise
        except OSError as error:
            raise SyncError(f"engine: the other end cannot be reached: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"no bridge of mode '{link['mode']}' can be opened from it: {type(error).__name__}: {error}"
            raise RequestRefused(422, text, field="link") from error

    # --- pauses

    async def _begin_pause(self, lease_s: float, *, writing: bool) -> None:
        now = asyncio.get_running_loop().time
        if self._pause is None:
            self._pause = self._lease(
                _Pause(now() + lease_s, lease_s)
            )  # first: without a lease, a lost caller would leave it asleep for ever
        if not self._pause.asleep:
            await self._engine.sleep()
            self._pause.asleep = True
        if writing and not self._pause.writing:
            await self._engine.remember()
            self._pause.writing = True
        self._pause.lease_s, self._pause.until = lease_s, now() + lease_s

    def _lease(self, pause: _Pause) -> _Pause:
        pause.expiry = asyncio.create_task(self._expire(pause), name="lease")
        return pause

    async def _expire(self, pause: _Pause) -> None:
        now = asyncio.get_running_loop().time
        while pause is self._pause and not self._dead:
            if (left_s := pause.until - now()) > 0:
                await asyncio.sleep(left_s)
                continue
            async with self._turn:
                if pause is self._pause and pause.until <= now():
                    self._abandoned = pause.writing
                    try:
                        await self._end_pause(f"its lease of {pause.lease_s:g} s was not renewed")
                    except TandemError as error:
                        pause.until = now() + WAKE_AGAIN_S
                        _log.warning("the pause is over, and the engine does not wake: %s", error)

    async def _end_pause(self, why: str) -> None:
        """Serve the old version again; or nothing, if the weights have changed."""
        intact = True
        if self._pause is not None and self._pause.writing:
            self._drop_pause()
            intact = await self._is_intact()
        if intact:
            await self._wake()  # before the pause is dropped: it lasts until the engine has its memory back
            self._drop_pause()
        if self.why_torn:
            _log.error("the pause is over (%s), and the weights are torn", why)
        else:
            _log.info("the pause is over: %s", why)

    async def _wake(self) -> None:
        """Wake the engine. If it wakes with torn weights, it stays torn; another try would not help."""
        try:
            await self._engine.wake()
        except TandemError as error:
            if self._engine.lent_bytes or not self._engine.why_torn:
                raise
            _log.error("the engine is awake: %s", error)

    async def _after_failed_load(self) -> None:
        if self._engine.lent_bytes:
            return  # it did not wake: the pause and its lease continue
        written = self._drop_pause()
        try:
            if written:
                await self._engine.sleep()
            if not written or await self._is_intact():
                await self._wake()
        except TandemError as error:
            _log.warning("a load has failed, and the engine does not wake: %s", error)
            if not written:
                until = asyncio.get_running_loop().time() + WAKE_AGAIN_S
                self._pause = self._lease(_Pause(until, WAKE_AGAIN_S, asleep=True))
            elif not self._torn:
                self._torn = f"engine: a load failed and its weights are unknown: {error}"

    def _drop_pause(self) -> bool:
        """End the pause without waking. Return whether a trainer may have written during it."""
        pause, self._pause = self._pause, None
        if pause is None:
            return False
        if pause.expiry is not None and pause.expiry is not asyncio.current_task():
            pause.expiry.cancel()
        return pause.writing

    async def _is_intact(self) -> bool:
        if self._engine.why_torn and not self._torn:
            self._tear()
        if self._torn:
            return False  # the recorded memory may be torn too
        self._torn = "engine: it is checking its weights after an interrupted write"
        if intact := await self._engine.intact():
            self._torn = ""
        else:
            self._tear()
        return intact

    async def _check_untouched(self) -> None:
        """Raise EngineLost if an abandoned trainer has written after all."""
        if not self._abandoned:
            return
        async with self._turn:
            await self._look_if_abandoned()
        if self.why_torn:
            raise EngineLost(self.why_torn)

    async def _look_if_abandoned(self) -> None:
        if self._abandoned and not self.why_torn and not await self._engine.intact():
            self._tear()

    def _tear(self) -> None:
        self._torn = (
            f"engine: a write into its weights was interrupted; they mix version {self.version} with another. It "
            "answers again when a trainer has loaded a version"
        )
        for answer in self._running:
            answer.cancel()

    # --- in the background

    def _watch_engine(self) -> None:
        if self._watch is None:
            self._watch = asyncio.create_task(self._until_lost(), name="engine lost")

    async def _until_lost(self) -> None:
        await self._engine.lost()
        self._dead = "engine: it has stopped; its log says why"
        _log.error(self._dead)


def _fenced() -> RequestRefused:
    text = "engine: another trainer has attached since; this one may no longer change its weights"
    return RequestRefused(409, text, field="attachment", code=FENCED)
