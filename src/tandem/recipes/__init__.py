"""The recipes, and the functions behind the command line and the Python API."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.data.file_rows import refuse_no_file
from tandem.errors import ArtifactError, SpecError, TandemError
from tandem.io.extras import require_extra
from tandem.io.model_path_check import refuse_missing, refuse_no_model
from tandem.obs.closing_summary import closing_text
from tandem.obs.live_view import LiveView
from tandem.obs.report import write_report
from tandem.obs.run_history import read_status
from tandem.obs.trackers.tracker_process import TrackerTarget, openers
from tandem.obs.trackers.tracker_queue import Feed
from tandem.runs.checkpointer import RunCheckpointer
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.failure_diagnosis import chain, classify_error
from tandem.runs.lease import DirectoryLease, begin, need_room
from tandem.runs.run import Run, StoppedByHand
from tandem.runs.run_ending import finished, say_failed, spec_of
from tandem.runs.uploads import CheckpointUploads, push_artifacts
from tandem.spec.algorithm import DistillSpec
from tandem.spec.artifacts import ArtifactsSpec
from tandem.spec.data import FileData
from tandem.spec.load import AnySpec, as_spec, to_toml
from tandem.spec.rollouts import AtroposRollouts
from tandem.spec.run import PreferenceSpec, RlSpec, RunSpec, SftSpec

require_extra("train", "torch", "transformers", "tokenizers", "safetensors", "peft", "fastapi", "uvicorn", "msgspec")

_log = logging.getLogger(__name__)

_ENDING = b"\ntandem: the run is saved and ends when this step has ended; Ctrl-C again ends it without that\n"


def run(
    spec: AnySpec,
    run_dir: str | Path | None = None,
    *,
    root: str | Path = "runs",
    view: LiveView | None = None,
    rehearse: bool = False,
) -> Run:
    """Do what the spec asks, in a directory of its own; the run that is returned says how it went. `rehearse`: tries
    the largest micro-batches and a sync before, against the plan."""
    spec = as_spec(spec)
    if isinstance(spec, RlSpec) and isinstance(spec.rollouts, AtroposRollouts):
        raise SpecError("rollouts.kind = 'atropos': `tandem atropos SPEC` starts such a run, and all that it needs")
    # Before torch: what is not there, and wrong parameters of an environment, are refused at once.
    _refuse_missing(spec)
    environment = _environment(spec)
    directory = Path(run_dir) if run_dir else Run.new_directory(Path(root), spec.name)
    spec = spec.in_place()  # it may be resumed from another directory
    begin(directory, to_toml(spec))
    return _go(spec, DirectoryLease(directory), directory, environment, view or LiveView(spec.name), rehearse=rehearse)


def _refuse_missing(spec: RunSpec) -> None:
    """What a spec names and is not there, before the run has a directory, and before torch is imported."""
    refuse_missing(spec.model)
    algorithm = getattr(spec, "algorithm", None)
    if isinstance(algorithm, DistillSpec):
        refuse_no_model(algorithm.teacher, algorithm.teacher_revision, "algorithm.teacher")
    warmup = spec.warmup if isinstance(spec, RlSpec) else None
    field, data = ("warmup.data", warmup and warmup.data) if isinstance(spec, RlSpec) else ("data", spec.data)
    if isinstance(data, FileData):
        refuse_no_file(Path(data.path), f"{field}.path")
        if data.eval_path:
            refuse_no_file(Path(data.eval_path), f"{field}.eval_path")


def resume(directory: str | Path, *, take_over: bool = False, view: LiveView | None = None) -> Mapping[str, Any]:
    """Go on with a run that was killed, stopped or failed, from its last whole checkpoint; return its status. One
    that succeeded is left as it is. `take_over`: from a process that holds the run and cannot be ended."""
    directory = Path(directory)
    spec, view = spec_of(directory), view or LiveView(directory.name)
    if (status := finished(directory)) is None or _lacks(spec, directory, status):
        lease = DirectoryLease(directory, take_over=take_over)
        if (status := finished(directory)) is None:  # or the process that held it finished meanwhile
            environment = _environment(spec)
            return _go(spec, lease, directory, environment, view).status
        try:
            if _lacks(spec, directory, status):
                write_report(directory)
                if spec.artifacts is not None:
                    _keep(directory, spec.artifacts, view, math.inf)
        finally:
            lease.close()
        status = read_status(directory)
    view.console.print(closing_text(directory, status), soft_wrap=True)
    return status


def _environment(spec: RunSpec) -> Any:
    from tandem.build import training

    if not isinstance(spec, RlSpec) or spec.environment is None:
        return None
    return training.environment(spec.environment)


def _lacks(spec: RunSpec, directory: Path, status: Mapping[str, Any]) -> bool:
    """True if the process that finished the run was killed before it wrote the report, or uploaded the artifacts."""
    return not (directory / "report.html").exists() or (spec.artifacts is not None and "artifacts" not in status)


def _go(
    spec: RunSpec, lease: DirectoryLease, directory: Path, environment: Any, view: LiveView, *, rehearse: bool = False
) -> Run:
    from tandem.build import training

    try:
        shelf = Checkpoints(directory, permit=lease.check)
        shelf.sweep()
        try:
            found = shelf.newest()
        except TandemError as error:
            say_failed(directory, read_status(directory), classify_error(error), f"{type(error).__name__}: {error}")
            raise
        made = Run(
            directory, name=spec.name, recipe=spec.recipe, view=view, lease=lease, strict=spec.strict,
            earlier=found.state["run"] if found else None,
        )  # fmt: skip
        uploads = _uploads(directory, spec.artifacts)
        checkpointer = RunCheckpointer(spec.checkpoint, shelf, made, found, uploads)
        try:
            with _signals_end(checkpointer), view, made:
                view.say(f"run {directory}")
                for text in shelf.set_aside:
                    made.event("checkpoint_damaged", message=text)
                    view.say(f"   {text}")
                if found is not None:
                    made.event("resume", step=found.version, epoch=lease.epoch)
                    view.say(f"   goes on from the checkpoint of step {found.version}")
                try:
                    asyncio.run(
                        _train(spec, made, environment, checkpointer, rehearse=rehearse, fresh=lease.epoch == 1)
                    )
                except Exception as error:
                    if checkpointer.ending in chain(error):  # a library made an error of it, while it was imported
                        raise checkpointer.ending from error
                    raise
                finally:
                    checkpointer.close()
        finally:
            if uploads is not None:
                uploads.finish(checkpointer.left_s())
            if lease.holds():  # or else another process owns the run and its report
                _conclude(made)
                if spec.artifacts is not None:
                    _keep(directory, spec.artifacts, view, checkpointer.left_s())
    finally:
        training.close(environment)
        lease.close()
    return made


def _conclude(run: Run) -> None:
    try:
        write_report(run.directory)
        run.view.console.print(closing_text(run.directory, run.status), soft_wrap=True)  # paths stay whole
    except Exception:  # noqa: BLE001 - a picture that cannot be drawn must not hide how the run went
        _log.exception("the report could not be written; `tandem report %s` tries again", run.directory)


def _uploads(directory: Path, spec: ArtifactsSpec | None) -> CheckpointUploads | None:
    """A store that cannot be opened is reported at the end, as all that goes wrong with copies."""
    if spec is None or "checkpoints" not in spec.what:
        return None
    try:
        return CheckpointUploads(directory, spec)
    except ArtifactError as error:
        _log.warning("checkpoints are not uploaded while the run goes on: %s", error)
        return None


def _keep(directory: Path, spec: ArtifactsSpec, view: LiveView, timeout_s: float) -> None:
    """Whatever becomes of the copies, the run is what it is."""
    try:
        done = push_artifacts(directory, spec, timeout_s=timeout_s)
    except Exception:  # noqa: BLE001 - the same
        _log.exception("nothing was uploaded; `tandem artifacts push %s` tries again", directory)
        return
    failed = [upload for upload in done if upload.state == "failed"]
    view.say(f"artifacts: {len(done) - len(failed)} of {len(done)} in {spec.url}")
    for upload in failed:
        view.say(f"   {upload.name}: {upload.error}")
    if failed:
        view.say(f"   `tandem artifacts push {directory}` tries again; the run itself is not affected")


async def _train(
    spec: RunSpec, run: Run, environment: Any, checkpointer: RunCheckpointer, *, rehearse: bool, fresh: bool
) -> None:
    from tandem.build import training
    from tandem.recipes import rehearsal
    from tandem.recipes.plan_run import keep_plan
    from tandem.recipes.preference import train_preference
    from tandem.recipes.rl import RlRun
    from tandem.recipes.sft import train_sft

    if (track := spec.track) is not None:
        place = TrackerTarget(str(run.directory), run.directory.name, track.project, track.url)
        run.tracking = Feed(openers(track.to, place), tell=run.warn)
    run.progress.setup_s, run.progress.step_s = spec.liveness.setup_s, spec.liveness.step_s
    plan = keep_plan(spec, run, environment)
    if plan is not None and fresh:
        need_room(run.directory, "begin", int(plan.checkpoint_gib * 2**30), ", one checkpoint included")
    if rehearse:
        if plan is None:
            raise SpecError("--rehearse: the planner does not know this model, so there is nothing to compare with")
        await asyncio.to_thread(rehearsal.rehearse, run, spec, plan)
    run.event("load")
    if isinstance(spec, SftSpec):
        await train_sft(spec, run, checkpointer)
        return
    if isinstance(spec, PreferenceSpec):
        await train_preference(spec, run, checkpointer)
        return
    rl = RlRun(spec, run, environment, checkpointer)
    try:
        await rl.train()
        training.export(rl.model, run.directory / "export")
    finally:
        await rl.close()


@contextmanager
def _signals_end(checkpointer: RunCheckpointer) -> Iterator[None]:
    """SIGTERM and Ctrl-C save and end the run: at once, or when the step that is under way has ended; after
    checkpoint.grace_s, or when the signal comes again, with what was saved before. A run that saves nothing is
    cancelled."""
    last: list[threading.Timer] = []

    def stop(number: int, _frame: Any) -> None:
        by_hand = number == signal.SIGINT
        if by_hand and (checkpointer.stop_asked or not checkpointer.spec.every):
            raise KeyboardInterrupt
        if not checkpointer.spec.every:
            raise SystemExit(143)
        asked_before = checkpointer.stop_asked
        checkpointer.ask_to_stop(StoppedByHand() if by_hand else SystemExit(0))
        if checkpointer.idle:
            checkpointer.save_now()
        elif not asked_before:
            if by_hand:
                os.write(2, _ENDING)  # and not by print: a handler may have interrupted one
            last.append(threading.Timer(checkpointer.spec.grace_s, signal.raise_signal, (signal.SIGTERM,)))
            last[0].daemon = True
            last[0].start()
            return
        raise checkpointer.ending

    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread, which alone may set handlers
        yield
        return
    try:
        yield
    finally:
        for timer in last:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
