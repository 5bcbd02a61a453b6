"""Save the state of a run, so that another process can resume it.

consumes: marks of the loop          waits for: the previous save, if the next one is due
produces: checkpoints                written by its own thread, from a copy that the loop's thread made

A mark is the state between two steps: one has ended, and nothing of the next has begun. Only marks are saved.
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
from tandem.runs.saved_steps import kept_steps, score
from tandem.runs.uploads import CheckpointUploads
from tandem.spec.checkpoint import CheckpointSpec
from tandem.types import Group, Metrics

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0  # no step follows the last save of a stage, so it is retried here


class RunCheckpointer:
    def __init__(
        self,
        spec: CheckpointSpec,
        shelf: Checkpoints,
        run: Run,
        found: VerifiedCheckpoint | None,
        uploads: CheckpointUploads | None = None,
    ) -> None:
        """`found`: the checkpoint to resume from. `uploads`: called after every save."""
        self.spec, self._shelf, self._run, self.found = spec, shelf, run, found
        self.idle = True
        """Whether no step has begun since the last mark, so that it can be saved at once."""
        self._uploads = uploads
        self._asked_at = math.inf
        self.ending: SystemExit | StoppedByHand = SystemExit(0)
        """The exception to raise once the last mark is saved."""
        self._evaluations: dict[str, Any] = dict(found.state["evaluations"]) if found else {}
        self._best: list[float] = list(found.state["best"]) if found else []
        """Version and value of the best evaluation; a higher value is better."""
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
        """Whether to save the next mark and then end the process."""
        return self._asked_at < math.inf

    def ask_to_stop(self, ending: SystemExit | StoppedByHand) -> None:
        self.ending = ending
        self._asked_at = min(self._asked_at, time.monotonic())

    def left_s(self) -> float:
        """Seconds left of the grace period; infinite while no stop was requested."""
        return max(1.0, self._asked_at + self.spec.grace_s - time.monotonic()) if self.stop_asked else math.inf

    # --- called by a recipe

    def goes_on_in(self, stage: str) -> bool:
        return self.found is not None and self.found.stage == stage

    def load(self, trainer: Trainer, stage: str) -> bool:
        """Load the trainer from the checkpoint if it was saved in this stage; return whether it was."""
        if self.found is None or self.found.stage != stage:
            return False
        trainer.load(self.found.path)
        return True

    def remember(self, name: str, evaluation: Any) -> None:
        """Store an evaluation, so that a resumed run does not repeat it."""
        self._evaluations[name] = evaluation

    def remembered(self, name: str) -> Any:
        return self._evaluations.get(name)

    def reference(self) -> Path | None:
        """Return the path that an earlier process saved with `keep_reference`; None if there is none."""
        return self._shelf.directory / self._reference if self._reference else None

    def keep_reference(self, version: int, fill: Any) -> None:
        """Save the reference weights once, beside the checkpoints; later checkpoints name them."""
        if self.spec.every:
            self._reference = self._shelf.keep_aside(f"reference-{version}", fill)

    # --- called by the loop

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
        """Save the last mark if a checkpoint is due. Return the groups that the store may forget: a checkpoint contains
        them, or no checkpoint will."""
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
            due = False  # the step was undone, so this is the previous version; its data is handed out again
        else:
            due = self._is_better(version, metrics) or version % self.spec.every == 0 or last or self._failures > 0
        if due or self.stop_asked:
            done += await self._save(wait=last or self.stop_asked)
        if self.stop_asked:
            raise self.ending
        self.idle = True
        return done

    def save_now(self) -> None:
        """Save the last mark on this thread. A signal handler calls it, so it logs nothing and writes no event."""
        if self._writing is not None:
            self._writing.exception()
        if self._trainer is not None and self._state and self._trainer.version > self._saved_for_sure():
            self._run.settle()
            self._shelf.write(self._trainer.version, self._trainer.snapshot(), self._state)

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    # --- saving

    async def _save(self, *, wait: bool) -> list[Group]:
        """Start a save, after the previous one has ended. `wait`: until it is on the disk, with retries."""
        assert self._trainer is not None
        started, done = time.perf_counter(), list[Group]()
        while True:
            if self._writing is not None:
                ended = asyncio.wrap_future(self._writing)
                await asyncio.wait([ended])
                ended.exception()  # retrieved, or asyncio warns; _poll handles the error
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
            self._run.settle()  # the rows before the offsets in `state`
            self._shelf.write(version, fill, state)
            with contextlib.suppress(OSError):  # what cannot be removed now is removed after the next save
                self._shelf.prune(keep)  # only after the new checkpoint is on the disk
            return time.perf_counter() - began

        self._under_way = (version, self._uncontained, time.perf_counter() - since)
        self._uncontained = []
        self._writing = self._writer.submit(work)

    def _poll(self) -> list[Group]:
        """Return the groups in the save that ended; none while it is in progress or if it failed."""
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
        if isinstance(error, RunFenced | RankLost):  # no later save can succeed
            raise error
        self._uncontained = groups + self._uncontained
        self._failures += 1
        self._run.event("checkpoint_failed", step=version, message=f"{type(error).__name__}: {error}")
        _log.warning("checkpoint of step %d: %s: %s", version, type(error).__name__, error)
        if self._failures >= self.spec.max_failures:
            raise CheckpointUnsaved(
                f"checkpoint: {self._failures} saves in a row failed (checkpoint.max_failures); the last, of step "
                f"{version}: {type(error).__name__}: {error}; free space, then `tandem resume {self._run.directory}`"
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
        """Return whether this evaluation is better than all earlier ones of the run, and remember it if so."""
        if not self.spec.keep_best:
            return False
        value = score(metrics)
        if value is None or (self._best and value <= self._best[1]):
            return False
        self._best = [version, value]
        self._state["best"] = list(self._best)
        return True

    def _kept(self, version: int) -> set[int]:
        there = sorted({*self._shelf.versions(), version})
        kept = kept_steps(there, self.spec, int(self._best[0]) if self._best else None)
        return kept | (self._uploads.held() if self._uploads else set())
