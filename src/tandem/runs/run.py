"""A run is a directory: what was asked, what happened, what came out of it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from tandem.errors import RunError, SpecError
from tandem.io import atomic
from tandem.io.jsonl import JsonlWriter
from tandem.obs.live import LiveView
from tandem.obs.trackers.feed import Feed
from tandem.runs.failures import classify_error
from tandem.runs.liveness import STACKS, Progress, Sign, Watchdog
from tandem.types import Message, Metrics, Proof

_STATUS_EVERY_S = 2.0  # steps_done for whoever looks from outside

State = Literal["running", "succeeded", "failed", "cancelled"]


class Run:
    """Open it with `with`: the status is `running` inside, and afterwards says how it ended."""

    def __init__(
        self, directory: Path, *, name: str, recipe: str, spec_toml: str, view: LiveView, strict: bool = False
    ) -> None:
        if directory.exists() and any(directory.iterdir()):
            raise RunError(f"{directory}: is not empty; give each run a directory of its own (--run-dir)")
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.view, self._strict = directory, view, strict
        self.status: dict[str, Any] = {
            "state": "queued",
            "name": name,
            "recipe": recipe,
            "steps_done": 0,
            "steps_total": 0,
            "eval": {},
        }
        self._stage = ""
        self._event_number = 0
        self._started = self._status_written = time.monotonic()
        atomic.write_text(directory / "spec.toml", spec_toml)
        self._metrics, self._events, self._ledger, self._samples = (
            JsonlWriter(directory / f"{name}.jsonl") for name in ("metrics", "events", "sync", "samples")
        )
        self._log = logging.FileHandler(directory / "log.txt", encoding="utf-8")
        self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.tracking = Feed({})
        self.progress = Progress(directory)
        self._watchdog = Watchdog(self.progress, directory / STACKS, self._stalled)

    @staticmethod
    def new_directory(root: Path, name: str) -> Path:
        """runs/<name>-<time>, with a number behind it where that is taken."""
        base = root / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        return next(
            path
            for number in range(1000)
            if not (path := base.with_name(base.name + (f"-{number}" if number else ""))).exists()
        )

    def __enter__(self) -> Run:
        logger = logging.getLogger("tandem")
        logger.addHandler(self._log)
        logger.setLevel(logging.INFO)
        self._watchdog.start()
        self.event("boot", pid=os.getpid())
        self._set_state("running")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.event("done")
            self._set_state("succeeded")
        else:
            cancelled = isinstance(error, KeyboardInterrupt | SystemExit)
            self.status["error"] = f"{type(error).__name__}: {error}"
            self.status["failure"] = failure = classify_error(error).row()
            self.event("error", kind=type(error).__name__, message=str(error), **failure)
            logging.getLogger(__name__).error("the run ended", exc_info=(type(error), error, traceback))
            self._set_state("cancelled" if cancelled else "failed")
        self._watchdog.stop()
        self.tracking.close()
        for writer in (self._metrics, self._events, self._ledger, self._samples):
            writer.close()
        logging.getLogger("tandem").removeHandler(self._log)
        self._log.close()

    # --- what happens in it

    def event(self, stage: str, **data: Any) -> None:
        """Numbered, in order; `at` is this machine's clock and nothing is decided by it."""
        self._event_number += 1
        self._events.write(
            {
                "number": self._event_number,
                "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "stage": stage,
                **data,
            }
        )

    def stage(self, name: str, steps: int, note: str = "") -> None:
        self._stage = name
        self.event(name, steps=steps)
        self.progress.stage(name)
        self.view.stage(name, steps, note)

    def record(self, step: int, metrics: Metrics) -> None:
        self.progress.step(step)
        if metrics.get("train/set_aside"):
            self.event("set_aside", step=step)  # no step was taken; log.txt has the tasks
            return
        row = {"step": step, "stage": self._stage, **metrics}
        self._metrics.write(row)
        self.tracking.row(row)
        self.view.step(row)
        self.status["steps_done"] = step
        if time.monotonic() - self._status_written > _STATUS_EVERY_S:
            self._write_status()

    def evaluated(
        self, name: str, label: str, value: float, *, metric: Literal["accuracy", "loss"] = "accuracy"
    ) -> None:
        """`name` is its field in status.json."""
        self.progress.tick()
        self.status["eval"][name] = value
        self.event("eval", name=name, **{metric: value})
        self.view.evaluation(label, value, metric=metric)
        self._write_status()

    def synced(self, proof: Proof) -> None:
        """A row of the ledger."""
        self._ledger.write(asdict(proof))

    def met(self, meeting: Mapping[str, Any]) -> None:
        """What the engines said of themselves when they were attached."""
        atomic.write_json(self.directory / "sync-map.json", meeting)

    def sample(self, when: str, task: str, messages: Sequence[Message], reward: float) -> None:
        self._samples.write(
            {"when": when, "task": task, "messages": [dict(message) for message in messages], "reward": reward}
        )

    def note_option(self, option: str, requested: Any, engaged: bool, note: str = "") -> None:
        """Every optimisation says whether it was had; under `strict`, one that was not ends the run.

        `note` says why not, or what it costs.
        """
        if engaged:
            self.event("option", option=option, requested=requested, engaged=True, note=note)
            return
        why_not = note
        self.event("option", option=option, requested=requested, engaged=False, why_not=why_not)
        if self._strict:
            raise SpecError(f"{option} = {requested}: cannot be had, {why_not}; ask for less, or set strict = false")
        self.view.say(f"   {option} = {requested}: not engaged, {why_not}")

    def conclude(self, verdict: str, evaluation: Mapping[str, Any]) -> None:
        self.status["verdict"] = verdict
        self.status["eval"] |= evaluation
        self._write_status()

    def _stalled(self, sign: Sign, quiet_s: float) -> None:
        """On the watchdog's thread, which moves nothing on."""
        seen = {"in": sign.stage, "after_step": sign.step, "quiet_s": round(quiet_s, 1), "limit_s": sign.limit_s}
        self.event("stalled", **seen, stacks=STACKS)
        logging.getLogger(__name__).warning("no progress for %.0f s in stage %s: %s", quiet_s, sign.stage, STACKS)

    def _set_state(self, state: State) -> None:
        self.status["state"] = state
        self.status["seconds"] = round(time.monotonic() - self._started, 3)
        self._write_status()

    def _write_status(self) -> None:
        self._status_written = time.monotonic()
        atomic.write_json(self.directory / "status.json", self.status)
