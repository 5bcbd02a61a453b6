"""The recipes, and the functions behind the command line and the Python API."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.obs.live import LiveView
from tandem.obs.report import write_report
from tandem.obs.summary import closing_text
from tandem.obs.trackers.feed import Feed, openers
from tandem.runs.run import Run
from tandem.runs.uploads import push_artifacts
from tandem.spec.artifacts import ArtifactsSpec
from tandem.spec.load import to_toml
from tandem.spec.run import PreferenceSpec, RlSpec, RunSpec, SftSpec

_log = logging.getLogger(__name__)


def run(spec: RunSpec, run_dir: Path | None = None, *, root: Path = Path("runs"), view: LiveView | None = None) -> Run:
    """Do what the spec asks, in a directory of its own; the run that is returned says how it went."""
    from tandem.recipes import build

    # Before torch: wrong parameters of an environment are refused at once.
    environment = build.environment(spec.environment) if isinstance(spec, RlSpec) else None
    view = view or LiveView(spec.name)
    directory = run_dir or Run.new_directory(root, spec.name)
    made = Run(directory, name=spec.name, recipe=spec.recipe, spec_toml=to_toml(spec), view=view, strict=spec.strict)
    try:
        with _sigterm_ends(), view, made:
            view.say(f"run {directory}")
            asyncio.run(_train(spec, made, environment))
    finally:
        build.close(environment)
        _conclude(made)
        if spec.artifacts is not None:
            _keep(made, spec.artifacts)
    return made


def _conclude(run: Run) -> None:
    try:
        write_report(run.directory)
        run.view.console.print(closing_text(run.directory, run.status), soft_wrap=True)  # paths stay whole
    except Exception:  # noqa: BLE001 - a picture that cannot be drawn must not hide how the run went
        _log.exception("the report could not be written; `tandem report %s` tries again", run.directory)


def _keep(run: Run, spec: ArtifactsSpec) -> None:
    """Whatever becomes of the copies, the run is what it is."""
    try:
        done = push_artifacts(run.directory, spec)
    except Exception:  # noqa: BLE001 - the same
        _log.exception("nothing was uploaded; `tandem artifacts push %s` tries again", run.directory)
        return
    failed = [upload for upload in done if upload.state == "failed"]
    run.view.say(f"artifacts: {len(done) - len(failed)} of {len(done)} in {spec.url}")
    for upload in failed:
        run.view.say(f"   {upload.name}: {upload.error}")
    if failed:
        run.view.say(f"   `tandem artifacts push {run.directory}` tries again; the run itself is not affected")


async def _train(spec: RunSpec, run: Run, environment: Any) -> None:
    from tandem.recipes import build
    from tandem.recipes.planning import keep_plan
    from tandem.recipes.preference import train_preference
    from tandem.recipes.rl import RlRun
    from tandem.recipes.sft import train_sft

    if (track := spec.track) is not None:
        names = {"directory": str(run.directory), "name": run.directory.name}
        run.tracking = Feed(openers(track.to, **names, project=track.project, url=track.url))
    run.progress.setup_s, run.progress.step_s = spec.liveness.setup_s, spec.liveness.step_s
    keep_plan(spec, run)
    run.event("load")
    if isinstance(spec, SftSpec):
        await train_sft(spec, run)
        return
    if isinstance(spec, PreferenceSpec):
        await train_preference(spec, run)
        return
    rl = RlRun(spec, run, environment)
    try:
        await rl.train()
        build.export(rl.model, run.directory / "export")
    finally:
        await rl.close()


@contextmanager
def _sigterm_ends() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that the status says `cancelled` and the report is written."""

    def stop(_signal: int, _frame: Any) -> None:
        raise SystemExit(143)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: whoever owns it owns its signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
