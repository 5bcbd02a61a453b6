"""Run or resume a spec: check it, set up the run directory, train by its recipe, save, report and upload."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.build import sight
from tandem.build.this_machine import refuse_no_vllm, this_machine
from tandem.data.file_rows import refuse_no_file
from tandem.errors import ArtifactError, SpecError, TandemError
from tandem.io import own_code
from tandem.io.extras import require_extra
from tandem.io.model_path_check import refuse_missing, refuse_no_model
from tandem.obs.closing_summary import closing_text
from tandem.obs.live_view import LiveView
from tandem.obs.report import write_report
from tandem.obs.run_history import read_status
from tandem.obs.trackers.tracker_process import Client, TrackerTarget, check_tracker, openers
from tandem.obs.trackers.tracker_queue import Feed
from tandem.protocols import Callback, Environment, OptimizerRule
from tandem.recipes.crew import crew_of, until_lost
from tandem.recipes.objects import AnyAlgorithm, Objects, check_same, with_objects
from tandem.recipes.packages import ReadyPackages, ready_packages
from tandem.runs.callbacks import load_callbacks
from tandem.runs.checkpointer import RunCheckpointer
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.failure_diagnosis import chain, classify_error
from tandem.runs.job_hosts import job_hosts
from tandem.runs.lease import DirectoryLease, begin, need_room
from tandem.runs.own_code_record import keep_code
from tandem.runs.run import Run, StoppedByHand
from tandem.runs.run_ending import asked_of, finished, say_failed, spec_of
from tandem.runs.uploads import CheckpointUploads, push_artifacts
from tandem.spec.algorithm import DistillSpec
from tandem.spec.artifacts import ArtifactsSpec
from tandem.spec.data import FileData
from tandem.spec.engine import VllmEngineSpec
from tandem.spec.hardware import HardwareChoice, choices_text
from tandem.spec.load import AnySpec, to_toml
from tandem.spec.own import is_own
from tandem.spec.ranks import on_ranks
from tandem.spec.rollouts import AtroposRollouts
from tandem.spec.run import RlSpec, RunSpec

require_extra("train", "torch", "transformers", "tokenizers", "safetensors", "peft", "fastapi", "uvicorn", "msgspec")

_log = logging.getLogger(__name__)

_ENDING = b"\ntandem: ending after this step, with a checkpoint; press Ctrl-C again to end now without one\n"


def run(
    spec: AnySpec,
    run_dir: str | Path | None = None,
    *,
    root: str | Path = "runs",
    view: LiveView | None = None,
    rehearse: bool = False,
    environment: Environment | None = None,
    algorithm: AnyAlgorithm | None = None,
    optimizer: OptimizerRule | None = None,
    callbacks: Sequence[Callback] = (),
    trackers: Sequence[Client] = (),
) -> Run:
    """Train as the spec says, in a new run directory, and return the run with its status. `rehearse`: first try the
    largest micro-batches and a sync, and compare them with the plan. The other arguments are objects of your own, in
    the place of what a spec names; docs/your_own.md has their methods."""
    objects = Objects(environment, algorithm, optimizer, callbacks, trackers)
    spec = with_objects(spec, objects)
    if isinstance(spec, RlSpec) and isinstance(spec.rollouts, AtroposRollouts):
        raise SpecError("rollouts.kind = 'atropos': start this spec with `tandem atropos SPEC`")
    if spec.sweep is not None:
        raise SpecError("sweep: is for several runs: start them with `tandem sweep SPEC`, or leave [sweep] out")
    # Before torch is imported: missing files and wrong environment parameters are refused at once.
    _refuse_missing(spec)
    spec = spec.in_place()  # absolute paths: the run may be resumed from another directory
    with own_code.session(objects.by_name()), ready_packages(spec) as packages, _gpu_given_back():
        _check_own_code(spec)
        played = _environment(spec, packages)
        asked = spec.settings()
        spec, chosen = sight.choose(spec, this_machine(spec.device))
        directory = Path(run_dir) if run_dir else Run.new_directory(Path(root), spec.name)
        begin(directory, to_toml(spec), None if packages is None else packages.directory)
        lease = DirectoryLease(directory)
        view, spec = view or LiveView(spec.name), spec.only_asked(asked)
        return _run(spec, lease, directory, played, view, chosen=chosen, rehearse=rehearse)


@contextmanager
def _gpu_given_back() -> Iterator[None]:
    """Afterwards the process has no more of a GPU than before: weights and moments of a run lie in cycles, and a
    notebook goes on to another run, whose engine may be a process of its own. A run that fails is freed before the next
    one: until its caller drops the error, the traceback holds the trainer."""
    _give_gpu_back()
    try:
        yield
    finally:
        _give_gpu_back()


def _give_gpu_back() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _check_own_code(spec: RunSpec) -> None:
    """Build each part of the user's own once, before the run directory is made: what is wrong with it is said now."""
    from tandem.build import training

    load_callbacks(spec.callbacks)
    training.check_own_code(spec)
    for name in spec.track.to if spec.track else ():
        if is_own(name):
            check_tracker(name)


def _refuse_missing(spec: RunSpec) -> None:
    """Refuse models, files and a vLLM that do not exist, before the run has a directory and torch is imported."""
    refuse_missing(spec.model)
    algorithm = getattr(spec, "algorithm", None)
    if isinstance(algorithm, DistillSpec) and not algorithm.is_served:
        refuse_no_model(algorithm.teacher, algorithm.teacher_revision, "algorithm.teacher")
    warmup = spec.warmup if isinstance(spec, RlSpec) else None
    field, data = ("warmup.data", warmup and warmup.data) if isinstance(spec, RlSpec) else ("data", spec.data)
    engine = spec.engine if isinstance(spec, RlSpec) else None
    if isinstance(engine, VllmEngineSpec) and not engine.url:
        refuse_no_vllm(engine.python)
    if isinstance(data, FileData):
        refuse_no_file(Path(data.path), f"{field}.path")
        if data.eval_path:
            refuse_no_file(Path(data.eval_path), f"{field}.eval_path")


def resume(
    directory: str | Path,
    *,
    take_over: bool = False,
    view: LiveView | None = None,
    ranks: int = 0,
    hosts: int = 0,
    environment: Environment | None = None,
    algorithm: AnyAlgorithm | None = None,
    optimizer: OptimizerRule | None = None,
    callbacks: Sequence[Callback] = (),
    trackers: Sequence[Client] = (),
) -> Mapping[str, Any]:
    """Resume a killed, stopped or failed run from its last complete checkpoint; return its status. A run that succeeded
    is left unchanged. `take_over`: take the run from a process that still holds it and cannot be ended. `ranks`: the
    number of ranks to train on; 0: as before. `hosts`: how many hosts they are on; 0: those of the job, or this one. A
    run that began with objects of Python needs the same ones; code that has changed since is reported."""
    directory = Path(directory)
    spec, view = spec_of(directory), view or LiveView(directory.name)
    if (status := finished(directory)) is None or _is_incomplete(spec, directory, status):
        lease = DirectoryLease(directory, take_over=take_over)
        if (status := finished(directory)) is None:  # again: the process that held the lease may have finished the run
            if job_hosts() is not None:
                hosts = spec.parallel.hosts
            spec = on_ranks(spec, ranks or spec.parallel.ranks, hosts)
            objects = Objects(environment, algorithm, optimizer, callbacks, trackers)
            with own_code.session(objects.by_name()), _gpu_given_back():
                try:
                    sight.refuse_unsupported(spec, sight.sees_images(spec))
                    check_same(spec, objects)
                    _check_own_code(spec)
                    with ready_packages(spec, directory) as packages:
                        played = _environment(spec, packages)
                except BaseException:
                    lease.close()
                    raise
                spec = spec.only_asked(asked_of(directory, spec))
                return _run(spec, lease, directory, played, view).status
        try:
            if _is_incomplete(spec, directory, status):
                write_report(directory)
                if spec.artifacts is not None:
                    _upload(directory, spec.artifacts, view, math.inf)
        finally:
            lease.close()
        status = read_status(directory)
    view.console.print(_closing(directory, status), soft_wrap=True)
    return status


def _environment(spec: RunSpec, packages: ReadyPackages | None) -> Any:
    from tandem.build import training

    if not isinstance(spec, RlSpec) or spec.environment is None:
        return None
    return training.environment(spec.environment, packages and packages.installed)


def _is_incomplete(spec: RunSpec, directory: Path, status: Mapping[str, Any]) -> bool:
    """Return whether a finished run lacks its report or uploads: its process was killed before it made them."""
    return not (directory / "report.html").exists() or (spec.artifacts is not None and "artifacts" not in status)


def _run(
    spec: RunSpec,
    lease: DirectoryLease,
    directory: Path,
    environment: Any,
    view: LiveView,
    *,
    chosen: Sequence[HardwareChoice] = (),
    rehearse: bool = False,
) -> Run:
    """Train under the lease, from the newest checkpoint if there is one. Afterwards, in any case: finish the uploads,
    write the report, close the environment and release the lease, in this order."""
    from tandem.build import training

    try:
        checkpoints = Checkpoints(directory, permit=lease.check)
        checkpoints.sweep()
        try:
            found = checkpoints.newest()
        except TandemError as error:
            say_failed(directory, read_status(directory), classify_error(error), f"{type(error).__name__}: {error}")
            raise
        run = Run(
            directory, name=spec.name, recipe=spec.recipe, view=view, lease=lease, strict=spec.strict,
            earlier=found.state["run"] if found else None,
        )  # fmt: skip
        uploads = _uploads(directory, spec.artifacts)
        checkpointer = RunCheckpointer(spec.checkpoint, checkpoints, run, found, uploads)
        try:
            with _signals_end(checkpointer), view, run:
                view.say(f"run {directory}")
                if lease.epoch == 1:
                    run.event("asked", settings=spec.settings())
                if chosen:
                    run.event("chosen", settings=[asdict(each) for each in chosen])
                    for line in choices_text(chosen):
                        view.say(f"   {line}")
                keep_code(run, spec, found.version if found else 0)
                for text in checkpoints.set_aside:
                    run.event("checkpoint_damaged", message=text)
                    view.say(f"   {text}")
                if found is not None:
                    run.event("resume", step=found.version, epoch=lease.epoch)
                    view.say(f"   resumes from the checkpoint of step {found.version}")
                try:
                    fresh = lease.epoch == 1
                    with crew_of(spec, directory) as crew:
                        training_of = _train(spec, run, environment, checkpointer, crew, rehearse=rehearse, fresh=fresh)
                        try:
                            asyncio.run(until_lost(crew, training_of))
                        finally:
                            checkpointer.close()  # a save in progress needs all ranks
                except Exception as error:
                    if checkpointer.ending in chain(error):  # a library may have wrapped it in its own error
                        raise checkpointer.ending from error
                    raise
                finally:
                    checkpointer.close()
        finally:
            if uploads is not None:
                uploads.finish(checkpointer.left_s())
            if lease.holds():  # otherwise another process owns the run and writes its report
                _report(run)
                if spec.artifacts is not None:
                    _upload(directory, spec.artifacts, view, checkpointer.left_s())
    finally:
        training.close(environment)
        lease.close()
    return run


def _report(run: Run) -> None:
    """Write the report and print the summary; a failure is logged only."""
    try:
        write_report(run.directory)
        run.view.console.print(_closing(run.directory, run.status), soft_wrap=True)  # keeps paths on one line
    except Exception:  # noqa: BLE001 - a failed report must not hide the result of the run
        _log.exception("the report could not be written; to try again: `tandem report %s`", run.directory)


def _closing(directory: Path, status: Mapping[str, Any]) -> Any:
    from tandem.build.built_model import embedded_refuses

    # The error is raised next and printed to stderr: on a terminal that shows both, once is enough.
    one_place = sys.stdout.isatty() and sys.stderr.isatty()
    return closing_text(directory, status, needs_vllm=embedded_refuses(directory / "export"), with_error=not one_place)


def _uploads(directory: Path, spec: ArtifactsSpec | None) -> CheckpointUploads | None:
    """Return the uploads of checkpoints during the run; None if the spec wants none or the store cannot be opened."""
    if spec is None or "checkpoints" not in spec.what:
        return None
    try:
        return CheckpointUploads(directory, spec)
    except ArtifactError as error:
        _log.warning("checkpoints are not uploaded during the run: %s", error)
        return None


def _upload(directory: Path, spec: ArtifactsSpec, view: LiveView, timeout_s: float) -> None:
    """Upload the artifacts and print what failed. A failed upload does not change the result of the run."""
    try:
        done = push_artifacts(directory, spec, timeout_s=timeout_s)
    except Exception:  # noqa: BLE001 - a failed upload must not hide the result of the run
        _log.exception("nothing was uploaded; to try again: `tandem artifacts push %s`", directory)
        return
    failed = [upload for upload in done if upload.state == "failed"]
    view.say(f"artifacts: {len(done) - len(failed)} of {len(done)} in {spec.url}")
    for upload in failed:
        view.say(f"   {upload.name}: {upload.error}")
    if failed:
        view.say(f"   to try again: `tandem artifacts push {directory}`; the run itself is not affected")


async def _train(
    spec: RunSpec, run: Run, environment: Any, checkpointer: RunCheckpointer, crew: Any, *, rehearse: bool, fresh: bool
) -> None:
    """Set up trackers, progress and plan, then train by the spec's recipe. `fresh`: no process has run it before."""
    from tandem.build import run_engines, training
    from tandem.recipes import rehearsal
    from tandem.recipes.plan_run import keep_plan
    from tandem.recipes.rl import RlRun
    from tandem.recipes.supervised import train_supervised

    if (track := spec.track) is not None:
        target = TrackerTarget(str(run.directory), run.directory.name, track.project, track.url)
        run.tracking = Feed(openers(track.to, target), tell=run.warn)
    run.call_back(load_callbacks(spec.callbacks))
    run.progress.setup_s, run.progress.step_s = spec.liveness.setup_s, spec.liveness.step_s
    plan = keep_plan(spec, run, environment)
    if plan is not None and fresh:
        need_room(run.directory, "begin", int(plan.checkpoint_gib * 2**30), ", one checkpoint included")
    if rehearse:
        if crew is not None:
            raise SpecError(
                f"--rehearse: rehearses one process, and parallel.ranks = {crew.ranks}; leave --rehearse out"
            )
        if plan is None:
            raise SpecError("--rehearse: the planner does not know this model; leave --rehearse out")
        await asyncio.to_thread(rehearsal.rehearse, run, spec, plan)
    run.event("load")
    run.view.doing("loading the model")
    if crew is not None:
        run.event("ranks", ranks=crew.ranks, hosts=crew.hosts)
        logs = "; their logs are in ranks/" if (run.directory / "ranks").exists() else ""
        run.view.say(f"   {crew.ranks} ranks, on {', '.join(dict.fromkeys(crew.hosts))}{logs}")
    if not isinstance(spec, RlSpec):
        await train_supervised(spec, run, checkpointer, crew)
        return
    with run_engines.begun(spec, run.directory / "engines") as begun:
        rl = RlRun(spec, run, environment, checkpointer, begun, crew)
        try:
            await rl.train()
            training.export(rl.model, run.directory / "export")
        finally:
            await rl.close()


@contextmanager
def _signals_end(checkpointer: RunCheckpointer) -> Iterator[None]:
    """Save and end the run on SIGTERM and Ctrl-C.

    Between steps the run is saved at once. During a step it is saved when the step ends. If that takes longer than
    checkpoint.grace_s, or at a second signal, the run ends with its last checkpoint. A run that saves nothing ends at
    once.
    """
    timers: list[threading.Timer] = []

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
                os.write(2, _ENDING)  # not print: the handler may have interrupted a print
            timers.append(threading.Timer(checkpointer.spec.grace_s, signal.raise_signal, (signal.SIGTERM,)))
            timers[0].daemon = True
            timers[0].start()
            return
        raise checkpointer.ending

    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # only the main thread may set handlers
        yield
        return
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            if signal.getsignal(number) is stop:  # after a rank was lost, SIGTERM is ignored
                signal.signal(number, handler)
