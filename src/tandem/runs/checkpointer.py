"""Remembers where a run is, so that another process can go on from there.

consumes: marks of the loop          waits for: the save before, if the next one is due
produces: checkpoints                in a thread of its own, from a copy that was made on the loop's

A mark is taken when a step has ended and nothing of the next has begun; what is saved is always a mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointUnsaved, RankLost, RunFenced
from tandem.protocols import Stateful, Trainer
from tandem.runs.checkpoints import Checkpoints, VerifiedCheckpoint
from tandem.runs.run import Run, StoppedByHand
from tandem.runs.uploads import CheckpointUploads
from tandem.spec.checkpoint import CheckpointSpec
from tandem.types import Group, Metrics

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0  # the last save of a stage has no step after it, at which it could be tried again


class RunCheckpointer:
    def __init__(
        self,
        spec: CheckpointSpec,
        shelf: Checkpoints,
        run: Run,
        found: VerifiedCheckpoint | None,
        uploads: CheckpointUploads | None = None,
    ) -> None:
        """`found`: where to go on. `uploads` hears of every save."""
        self.spec, self._shelf, self._run, self.found = spec, shelf, run, found
        self.idle = True
        """Nothing has been trained since the last mark: it can be saved at once."""
        self._uploads = uploads
        self._asked_at = math.inf
        self.ending: SystemExit | StoppedByHand = SystemExit(0)
        """What is raised once the last mark is saved."""
        self._evaluations: dict[str, Any] = dict(found.state["evaluations"]) if found else {}
        self._best: list[float] = list(found.state["best"]) if found else []
        """Version and value, more being better."""
        self._reference: str = found.state.get("reference", "") if found else ""
        self._trainer: Trainer | None = None
        self._parts: Mapping[str, Stateful] = {}
        self._last_version = 0
        self._marked: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._saved = found.version if found else -1
        self._failures = 0
        self._uncontained: list[Group] = []
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[float] | None = None
        self._under_way: tuple[int, list[Group], float] = (0, [], 0.0)

    @property
    def stop_asked(self) -> bool:
        """The next mark is the last: it is saved, and the process ends."""
        return self._asked_at < math.inf

    def ask_to_stop(self, ending: SystemExit | StoppedByHand) -> None:
        self.ending = ending
        self._asked_at = min(self._asked_at, time.monotonic())

    def left_s(self) -> float:
        """Seconds left of the grace period; infinite while no stop was requested."""
        return max(1.0, self._asked_at + self.spec.grace_s - time.monotonic()) if self.stop_asked else math.inf

    # --- of a recipe

    def goes_on_in(self, stage: str) -> bool:
        return self.found is not None and self.found.stage == stage

    def load(self, trainer: Trainer, stage: str) -> bool:
        """Gives the trainer what was saved in this stage, if anything was."""
        if self.found is None or self.found.stage != stage:
            return False
        trainer.load(self.found.path)
        return True

    def remember(self, name: str, evaluation: Any) -> None:
        """An evaluation that is not to be made again."""
        self._evaluations[name] = evaluation

    def remembered(self, name: str) -> Any:
        return self._evaluations.get(name)

    def reference(self) -> Path | None:
        """What an earlier process kept with `keep_reference`."""
        return self._shelf.directory / self._reference if self._reference else None

    def keep_reference(self, version: int, fill: Any) -> None:
        """What every later checkpoint refers to and none contains."""
        if self.spec.every:
            self._reference = self._shelf.keep_aside(f"reference-{version}", fill)

    # --- of the loop

    def begin(self, trainer: Trainer, parts: Mapping[str, Stateful], last_version: int) -> None:
        from tandem.ops import random_state

        self._state = {}
        self._trainer, self._parts, self._last_version = trainer, parts, last_version
        if self.found is not None and self.goes_on_in(self._run.current_stage):
            for name, part in parts.items():
                part.restore(self.found.state["parts"][name])
            random_state.restore(self.found.state["random"])
            self.found = None

    def step_started(self) -> None:
        self.idle = False

    def mark(self) -> None:
        from tandem.ops import random_state

        if self.spec.every:
            parts = {name: part.state() for name, part in self._parts.items()}
            self._marked = {"parts": parts, "random": random_state.capture()}

    async def save_if_due(self, groups: Sequence[Group], metrics: Metrics) -> list[Group]:
        """Save the last mark if a checkpoint is due. Return the groups that a checkpoint contains by now, or never
        will: the store need not hand them out again."""
        if not self.spec.every:
            return list(groups)
        assert self._trainer is not None
        self._uncontained += groups
        self._state = self._whole_state()
        done = self._poll()
        for upload in self._uploads.ended() if self._uploads else ():
            self._run.event("upload", **asdict(upload))
        version, last = self._trainer.version, self._trainer.version >= self._last_version
        if metrics.get("train/set_aside"):
            due = False  # it is the version before, and its data comes again
        else:
            due = self._is_better(version, metrics) or version % self.spec.every == 0 or last or self._failures > 0
        if due or self.stop_asked:
            done += await self._save(wait=last or self.stop_asked)
        if self.stop_asked:
            raise self.ending
        self.idle = True
        return done

    def save_now(self) -> None:
        """The last mark, on this thread, from a signal's handler: so nothing is logged and no event is written."""
        if self._writing is not None:
            self._writing.exception()
        if self._trainer is not None and self._state and self._trainer.version > self._saved_for_sure():
            self._run.settle()
            self._shelf.write(self._trainer.version, self._trainer.snapshot(), self._state)

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    # --- saving

    async def _save(self, *, wait: bool) -> list[Group]:
        """`wait`: till it is on the disk, however often that takes."""
        assert self._trainer is not None
        started, done = time.perf_counter(), list[Group]()
        while True:
            if self._writing is not None:
                ended = asyncio.wrap_future(self._writing)
                await asyncio.wait([ended])
                ended.exception()  # looked at, or asyncio complains of it; what becomes of it is for _poll to say
                done += self._poll()
            if self._trainer.version <= self._saved:
                return done
            if wait and self._failures:
                await asyncio.sleep(_AGAIN_S)
            self._start(self._trainer, started)
            if not wait:
                return done

    def _start(self, trainer: Trainer, since: float) -> None:
        version, fill, state = trainer.version, trainer.snapshot(), self._state
        keep = self._kept(version)

        def work() -> float:
            began = time.perf_counter()
            self._run.settle()  # what the offsets in `state` speak of
            self._shelf.write(version, fill, state)
            with contextlib.suppress(OSError):  # whatever cannot be removed now is tried again with the next
                self._shelf.prune(keep)  # only now: the new one is on the disk
            return time.perf_counter() - began

        self._under_way = (version, self._uncontained, time.perf_counter() - since)
        self._uncontained = []
        self._writing = self._writer.submit(work)

    def _poll(self) -> list[Group]:
        """What the save that ended contains; nothing while it goes on."""
        if self._writing is None or not self._writing.done():
            return []
        writing, self._writing = self._writing, None
        version, groups, stall_s = self._under_way
        error = writing.exception()
        if error is None:
            self._saved, self._failures = version, 0
            if self._uploads is not None:
                self._uploads.saved(version)
            self._run.event("checkpoint", step=version, stall_s=round(stall_s, 4), write_s=round(writing.result(), 4))
            return groups
        if isinstance(error, RunFenced | RankLost):  # nothing can be saved any more
            raise error
        self._uncontained = groups + self._uncontained
        self._failures += 1
        self._run.event("checkpoint_failed", step=version, message=f"{type(error).__name__}: {error}")
        _log.warning("checkpoint of step %d: %s: %s", version, type(error).__name__, error)
        if self._failures >= self.spec.max_failures:
            raise CheckpointUnsaved(
                f"checkpoint: {self._failures} saves in a row failed (checkpoint.max_failures), the last, of step "
                f"{version}, by {type(error).__name__}: {error}; make room, then `tandem resume {self._run.directory}`"
            ) from error
        return []

    def _saved_for_sure(self) -> int:
        if self._writing is not None and self._writing.exception() is None:
            return self._under_way[0]
        return self._saved

    def _whole_state(self) -> dict[str, Any]:
        return {
            "stage": self._run.current_stage,
            "evaluations": dict(self._evaluations),
            "best": list(self._best),
            "reference": self._reference,
            "run": self._run.state(),
            **self._marked,
        }

    def _is_better(self, version: int, metrics: Metrics) -> bool:
        """Than every evaluation in this run before it."""
        if not self.spec.keep_best:
            return False
        value = metrics.get("eval/accuracy", metrics.get("eval/reward"))
        if value is None and "eval/loss" in metrics:
            value = -metrics["eval/loss"]
        if value is None or (self._best and value <= self._best[1]):
            return False
        self._best = [version, value]
        self._state["best"] = list(self._best)
        return True

    def _kept(self, version: int) -> set[int]:
        there = sorted({*self._shelf.versions(), version})
        kept = set(there[-self.spec.keep_last :])
        if self.spec.keep_every:
            kept |= {each for each in there if each % self.spec.keep_every == 0}
        if self._best:
            kept.add(int(self._best[0]))
        return kept | (self._uploads.held() if self._uploads else set())
