"""The loop over rows: look, decide, do.

consumes: runs that have not ended, and what their providers see   waits for: a change of a row, or POLL_MS
produces: jobs at the providers, and the next state of each run

It remembers nothing: a process that starts on the same database goes on where any other stopped, at any instant. One
pass:

1. Each provider lists the jobs of this control plane.
2. The rows are read, only now: a listed job whose attempt is closed, or has no row, is an orphan for certain, since a
   row is written before its job is started.
3. For each run one step is decided (decide.py) and done: one transaction, or one call of a provider.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from tandem.control import transitions
from tandem.control.decide import (
    POLL_MS,
    AttemptView,
    Close,
    EndJobs,
    Launch,
    Move,
    Note,
    OpenAttempt,
    Rest,
    RunView,
    Step,
    decide,
)
from tandem.control.store import Store
from tandem.errors import Conflict, MaybeLaunched, ProviderBusy, ProviderRefused, ProviderSilent, StoreError
from tandem.job_types import Handle, Job, Sight
from tandem.protocols import Provider

_log = logging.getLogger(__name__)

_LAUNCHES_AT_ONCE = 16  # one over ssh takes a second
_END_GRACE_S = 2.0  # what is cancelled was asked before
_BUSY_MS = 5_000  # between two writes of a run that waits for room

Decide = Callable[[RunView, AttemptView | None, Sequence[Sight] | None, int], Step]


class Reconciler:
    def __init__(
        self,
        store: Store,
        providers: Mapping[str, Provider],
        job_of: Callable[[RunView, AttemptView], Awaitable[Job]],
        *,
        prefix: str,
        clock: Callable[[], int],
        decide: Decide = decide,
    ) -> None:
        """`providers`: by target. `job_of`: the job of a run's attempt; ProviderRefused fails the run. `prefix`: of the
        names of this control plane's jobs; jobs with another are never touched. `clock`: milliseconds since 1970."""
        self._store, self._providers, self._job_of = store, providers, job_of
        self._prefix, self._clock, self._decide = prefix, clock, decide
        self._silent: dict[str, str] = {}  # by target: why it did not list its jobs in this pass
        self._settled: set[Handle] = set()  # seen dead, and closed: not looked at again
        self._ending: dict[tuple[str, Handle], asyncio.Task[None]] = {}
        self._awake, self._launching = asyncio.Event(), asyncio.Semaphore(_LAUNCHES_AT_ONCE)

    def wake(self) -> None:
        """Begin the next pass now: a row has changed."""
        self._awake.set()

    async def run(self) -> None:
        """Pass after pass, until cancelled."""
        while True:
            self._awake.clear()
            try:
                stepped = await self.pass_once()
            except StoreError as error:  # full or gone; the database says when it is back
                _log.error("the loop waits for its database: %s", error)
                stepped = False
            if not stepped:
                try:
                    async with asyncio.timeout(POLL_MS / 1000):
                        await self._awake.wait()
                except TimeoutError:
                    pass

    async def pass_once(self) -> bool:
        """Look at every run once; return whether a row was written, so that more may be due at once."""
        listings = dict(zip(self._providers, await asyncio.gather(*map(self._list, self._providers)), strict=True))
        rows = await self._store.read(transitions.live)
        looks = await asyncio.gather(*(self._look(target, listed, rows) for target, listed in listings.items()))
        sights = dict(zip(listings, looks, strict=True))
        stepped = False

        async def step(run: RunView, attempt: AttemptView | None) -> None:
            nonlocal stepped
            seen = None if attempt is None else sights.get(attempt.target, {}).get(attempt.name)
            next_step = self._decide(run, attempt, seen, self._clock())
            try:
                if attempt is not None:
                    await self._tell_silence(run, attempt)
                if await self._do(run, attempt, next_step):
                    stepped = True
            except Conflict as error:
                _log.info("looked again: %s", error)  # another writer was first
                stepped = True
            except StoreError as error:
                _log.error("%s: %s", run.id, error)  # full or gone; the next pass decides again

        async with asyncio.TaskGroup() as group:
            for run, attempt in rows:
                group.create_task(step(run, attempt))
        await self._end_orphans(listings)
        return stepped

    async def close(self) -> None:
        for task in (waiting := list(self._ending.values())):
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    # --- what the providers see

    async def _list(self, target: str) -> list[Handle] | None:
        self._silent.pop(target, None)
        try:
            return await self._providers[target].find(self._prefix)
        except (ProviderSilent, ProviderRefused) as error:
            _log.warning("%s: %s", target, error)
            self._silent[target] = str(error)
            return None

    async def _look(
        self, target: str, listed: list[Handle] | None, rows: Sequence[tuple[RunView, AttemptView | None]]
    ) -> dict[str, list[Sight]]:
        """Return the sights of each attempt by its name; none at all where the provider did not list its jobs."""
        if listed is None:
            return {}
        names = {each.name: each for _, each in rows if each and each.target == target and each.state != "closed"}
        noted = [each.handle for each in names.values() if each.handle is not None]
        handles = list(dict.fromkeys([*noted, *(handle for handle in listed if handle.name in names)]))
        found: dict[str, list[Sight]] = {name: [] for name in names}
        for sight in await self._providers[target].look(handles) if handles else ():
            found[sight.handle.name].append(sight)
        return found

    # --- what is done

    async def _tell_silence(self, run: RunView, attempt: AttemptView) -> None:
        """Say in a run's row that it waits for a target that does not answer, and no more once it does."""
        silent, why = f"target '{attempt.target}' does not answer", self._silent.get(attempt.target)
        if attempt.target not in self._providers:
            why = "this server's file of targets has it no more"
        waits = attempt.state == "open" or (attempt.state == "claimed" and self._clock() > attempt.lease_until)
        told = f"{silent}: {why}" if why is not None and waits else ""
        if told != run.why and (told or run.why.startswith(silent)):
            await self._store.write(partial(transitions.note_why, run=run, why=told))

    async def _do(self, run: RunView, attempt: AttemptView | None, step: Step) -> bool:
        """Do a step; return whether a row was written."""
        now = self._clock()
        match step:
            case Rest():
                return False
            case OpenAttempt(n):
                change = partial(transitions.open_attempt, run=run, n=n, prefix=self._prefix, now=now)
            case Move(state, why):
                change = partial(transitions.move, run=run, state=state, why=why, now=now)
            case Note(handle):
                assert attempt is not None
                change = partial(transitions.note_handle, attempt=attempt, handle=handle)
            case Close(state, why, wait_ms):
                assert attempt is not None
                change = partial(
                    transitions.close, run=run, attempt=attempt, state=state, why=why, wait_ms=wait_ms, now=now
                )
            case Launch():
                assert attempt is not None
                return await self._launch(run, attempt)
            case EndJobs(handles):
                assert attempt is not None
                for handle in handles:
                    self._end(attempt.target, handle)
                return False
        await self._store.write(change)
        return True

    async def _launch(self, run: RunView, attempt: AttemptView) -> bool:
        """Ask for the job. An answer that is no answer writes nothing: the next pass finds the job, or asks again."""
        try:
            async with self._launching:
                handle = await self._providers[attempt.target].launch(await self._job_of(run, attempt))
        except (MaybeLaunched, ProviderSilent) as error:
            _log.warning("%s: %s", attempt.name, error)
            return False
        except ProviderBusy as error:
            if (now := self._clock()) - attempt.at >= _BUSY_MS:
                change = partial(transitions.wait_for_room, run=run, attempt=attempt, why=str(error), now=now)
                await self._store.write(change)
            return False
        except ProviderRefused as error:
            return await self._do(run, attempt, Close("failed", str(error)))
        await self._store.write(partial(transitions.note_handle, attempt=attempt, handle=handle))
        return True

    async def _end_orphans(self, listings: Mapping[str, list[Handle] | None]) -> None:
        """End listed jobs whose attempt is closed or unknown. Dead jobs stay listed, so look which are alive."""
        for target, listed in listings.items():
            mine = [each for each in listed or () if each.name.startswith(self._prefix) and each not in self._settled]
            names = [handle.name for handle in mine]
            kept = await self._store.read(partial(transitions.open_names, names=names)) if names else set[str]()
            orphans = [handle for handle in mine if handle.name not in kept]
            for sight in await self._providers[target].look(orphans) if orphans else ():
                if sight.state in ("waiting", "running"):
                    self._end(target, sight.handle)
                elif sight.state != "unknown":
                    self._settled.add(sight.handle)

    def _end(self, target: str, handle: Handle) -> None:
        """Begin to end a job, beside the loop: it takes as long as the job's grace."""
        key = (target, handle)
        if key not in self._ending:
            task = self._ending[key] = asyncio.create_task(self._ended(target, handle))
            task.add_done_callback(lambda _: self._ending.pop(key, None))

    async def _ended(self, target: str, handle: Handle) -> None:
        try:
            await self._providers[target].end(handle, _END_GRACE_S)
        except (ProviderSilent, ProviderRefused) as error:
            _log.warning("%s: cannot be ended: %s", handle.name, error)
