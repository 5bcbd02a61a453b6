"""The directory of a run: its spec, its events and metrics, its results."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from tandem.errors import RunFenced, SpecError
from tandem.io import atomic_write
from tandem.io.garbage_collector import StageFreeze
from tandem.io.jsonl import JsonlWriter, cut_back, salvage_jsonl
from tandem.io.kept_samples import KeptSamples
from tandem.obs.live_view import LiveView
from tandem.obs.report_writer import ReportWriter
from tandem.obs.trackers.tracker_queue import Feed
from tandem.ops.option_report import AUTO
from tandem.runs.callbacks import Callbacks
from tandem.runs.failure_diagnosis import classify_error
from tandem.runs.lease import DirectoryLease
from tandem.runs.liveness import STACKS, ProgressCounter, Sign, Watchdog
from tandem.types import Measure, Message, Metrics, Proof

_log = logging.getLogger(__name__)

_STATUS_EVERY_S = 2.0  # interval of steps_done in status.json

_FILES = ("metrics", "sync", "samples", "events")

State = Literal["running", "succeeded", "failed", "cancelled", "stopped"]
"""stopped: by SIGTERM or Ctrl-C, after a checkpoint; `tandem resume` continues it."""


class StoppedByHand(KeyboardInterrupt):
    """Ctrl-C ended the run after it was saved."""


class Run:
    """A run's files. In its `with` block the status is `running`; afterwards it says how the run ended.

    The directory exists already (runs/lease.py), and this process holds its lease.
    """

    def __init__(
        self, directory: Path, *, name: str, recipe: str, view: LiveView, lease: DirectoryLease, strict: bool = False,
        earlier: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`earlier`: the result of `state` in the checkpoint to resume from; rows written after it are cut off."""
        self.directory, self.view, self._strict, self._lease = directory, view, strict, lease
        self.status: dict[str, Any] = {
            "state": "queued",
            "name": name,
            "recipe": recipe,
            "steps_done": 0,
            "steps_total": 0,
            "eval": {},
        }
        self.current_stage = ""
        self._started = self._status_written = time.monotonic()
        if earlier is not None:
            self.status |= earlier["status"]
            self._started -= earlier["seconds"]
        self._numbering = threading.Lock()
        self._event_number = self._cut_back(earlier["files"] if earlier is not None else {})
        self._metrics, self._ledger, self._samples, self._events = (
            JsonlWriter(directory / f"{name}.jsonl") for name in _FILES
        )
        cut_back(directory / "log.txt")  # a process that lost the run may still log, to the old file
        self._log = logging.FileHandler(directory / "log.txt", encoding="utf-8")
        self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.tracking = Feed({})
        self._freeze = StageFreeze()
        self.callbacks = Callbacks()
        self._callback_states: Mapping[str, Any] = earlier.get("callbacks", {}) if earlier is not None else {}
        self.kept: KeptSamples | None = None
        """Where the answers of training steps are kept."""
        self._report = ReportWriter(directory, lease.check)
        self.progress = ProgressCounter(directory)
        self._watchdog = Watchdog(self.progress, directory / STACKS, self._stalled)

    @staticmethod
    def new_directory(root: Path, name: str) -> Path:
        """Return a path for a new run: <root>/<name>-<time>, with a number added if it exists."""
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
        proofs = (self.directory / "sync.jsonl").read_bytes().count(b"\n")
        self.event("boot", pid=os.getpid(), proofs=proofs)
        self._set_state("running")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._freeze.end()
        if error is None:
            self.event("done")
            self._set_state("succeeded")
        elif isinstance(error, StoppedByHand) or (isinstance(error, SystemExit) and error.code == 0):
            self.event("stopped")
            self._set_state("stopped")
        elif isinstance(error, RunFenced):
            logging.getLogger(__name__).error("%s", error)  # write nothing else: another process owns the run
        else:
            cancelled = isinstance(error, KeyboardInterrupt | SystemExit)
            self.status["error"] = f"{type(error).__name__}: {error}"
            self.status["failure"] = failure = classify_error(error).row()
            self.event("error", kind=type(error).__name__, message=str(error), **failure)
            logging.getLogger(__name__).error("the run ended", exc_info=(type(error), error, traceback))
            self._set_state("cancelled" if cancelled else "failed")
        self._watchdog.stop()
        self._report.close()
        self.callbacks.end(self.status)
        self.tracking.close()
        if self.kept is not None:
            self.kept.close()
        for writer in (self._metrics, self._events, self._ledger, self._samples):
            writer.close()
        logging.getLogger("tandem").removeHandler(self._log)
        self._log.close()

    # --- what happens in it

    def call_back(self, callbacks: Callbacks) -> None:
        """Call these after each step from now on; they go on from the checkpoint that the run resumes from."""
        self.callbacks = callbacks
        callbacks.start(self.directory, self._callback_states)

    def event(self, stage: str, **data: Any) -> None:
        """Write a numbered event. `at` is this machine's clock; nothing depends on it."""
        with self._numbering:  # the watchdog's thread writes events, too
            self._event_number += 1
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._events.write({"number": self._event_number, "at": at, "stage": stage, **data})

    def stage(self, name: str, steps: int, note: str = "") -> None:
        self.current_stage = name
        self._freeze.next_stage()
        self.event(name, steps=steps)
        self.progress.stage(name)
        self.view.stage(name, steps, note)

    def record(self, step: int, metrics: Metrics) -> None:
        self.progress.step(step)
        if metrics.get("train/set_aside"):
            self.event("set_aside", step=step)  # no step was taken; log.txt has the tasks
            return
        self.callbacks.step(step, self.current_stage, metrics)
        row = {"step": step, "stage": self.current_stage, **metrics}
        self._metrics.write(row)
        self.tracking.row(row)
        self.view.step(row)
        self.status["steps_done"] = step
        if time.monotonic() - self._status_written > _STATUS_EVERY_S:
            self._write_status()
        self._report.step()
        self._freeze.stepped()

    def state(self) -> dict[str, Any]:
        """Return the size of each file and the fields of status.json, for a checkpoint."""
        writers = (self._metrics, self._ledger, self._samples)
        return {
            "files": {name: writer.size_bytes for name, writer in zip(_FILES, writers, strict=False)},
            "status": {key: copy.deepcopy(self.status[key]) for key in ("steps_done", "steps_total", "eval")},
            "seconds": time.monotonic() - self._started,
            "callbacks": self.callbacks.state(),
        }

    def settle(self) -> None:
        """Wait until all rows so far are on the disk. Call it on any thread."""
        for writer in (self._metrics, self._ledger, self._samples):
            writer.settle()
        if self.kept is not None:
            self.kept.settle()

    def evaluated(self, name: str, label: str, value: float, *, metric: Measure = "accuracy") -> None:
        """Record an evaluation; `name` is its field in status.json. The first evaluation's measure decides the
        verdict."""
        self.progress.tick()
        self.status["eval"].setdefault("metric", metric)
        self.status["eval"][name] = value
        self.event("eval", name=name, **{metric: value})
        self.view.evaluation(label, value, metric=metric)
        self._write_status()

    def synced(self, proof: Proof) -> None:
        """Write a row of the ledger."""
        self._ledger.write(asdict(proof))

    def attached(self, attachment: Mapping[str, Any]) -> None:
        """Write what the attached engines reported."""
        atomic_write.write_json(self.directory / "sync-map.json", attachment)

    def sample(self, when: str, version: int, task: str, messages: Sequence[Message], reward: float) -> None:
        turns = [dict(message) for message in messages]
        self._samples.write({"when": when, "version": version, "task": task, "messages": turns, "reward": reward})

    def note_option(self, option: str, requested: Any, engaged: bool, note: str = "") -> None:
        """Report whether an option took effect. Under `strict`, one that did not ends the run if the spec asks for it.

        `note`: why it did not, or what it costs.
        """
        if engaged:
            self.event("option", option=option, requested=requested, engaged=True, note=note)
            return
        why_not = note
        self.event("option", option=option, requested=requested, engaged=False, why_not=why_not)
        if self._strict and requested != AUTO:
            raise SpecError(f"{option} = {requested}: is not available, {why_not}; change it, or set strict = false")
        self.view.say(f"   {option} = {requested}: not engaged, {why_not}")

    def warn(self, text: str) -> None:
        """Print a warning and log it. Call it on any thread."""
        _log.warning("%s", text)
        self.view.say(f"   {text}")

    def conclude(self, verdict: str, evaluation: Mapping[str, Any]) -> None:
        self.status["verdict"] = verdict
        self.status["eval"] |= evaluation
        self._write_status()

    def _stalled(self, sign: Sign, quiet_s: float) -> None:
        """Report a stall. Runs on the watchdog's thread, so it must not advance the progress counter."""
        seen = {"in": sign.stage, "after_step": sign.step, "quiet_s": round(quiet_s, 1), "limit_s": sign.limit_s}
        self.event("stalled", **seen, stacks=STACKS)
        logging.getLogger(__name__).warning("no progress for %.0f s in stage %s: %s", quiet_s, sign.stage, STACKS)

    def _cut_back(self, sizes: Mapping[str, int]) -> int:
        """Cut off the rows of steps that will be repeated; keep all events. Return the last event's number."""
        for name in _FILES[:3]:
            path = self.directory / f"{name}.jsonl"
            if not cut_back(path, sizes.get(name, 0)):
                _log.warning("%s: is shorter than the checkpoint says; rows are missing", path)
        events = self.directory / "events.jsonl"
        cut_back(events)
        return max((int(row.get("number", 0)) for row in salvage_jsonl(events).rows.values()), default=0)

    def _set_state(self, state: State) -> None:
        self.status["state"] = state
        self.status["seconds"] = round(time.monotonic() - self._started, 3)
        self._write_status()

    def _write_status(self) -> None:
        self._status_written = time.monotonic()
        self._lease.check()
        atomic_write.write_json(self.directory / "status.json", self.status)
