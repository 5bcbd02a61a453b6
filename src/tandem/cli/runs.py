"""`tandem runs`, `watch`, `explain`, `report`, `compare` and `tandem env list`: what there is, and how it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.options import AsJson, echo
from tandem.cli.remote import RunOrDir, print_runs, watch_remote
from tandem.runs.named_runs import explain_remote, is_run_id, run_directory


def runs(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Directory that holds runs. Default: the control server, or runs/."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs in a directory or of the control server, the newest last."""
    from tandem.runs.run_list import list_runs, runs_text

    if directory is None and print_runs(as_json):
        return
    found = list_runs(directory or Path("runs"))
    echo(json.dumps(found, indent=2) if as_json else runs_text(found))


def watch(
    run: RunOrDir,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Follow a run from another terminal: stage, step, metrics, events, stalls. Exit code 1: the run failed."""
    from tandem.runs.watch import watch_run

    if is_run_id(run):
        from tandem.client import Tandem

        with Tandem() as server:
            state = watch_remote(server.run(run), once=once, as_json=as_json)
    else:
        state = watch_run(run, once=once, as_json=as_json, tell=echo)
    if state == "failed":
        raise typer.Exit(1)


def explain(run: RunOrDir, as_json: AsJson = False) -> None:
    """Say why a run ended so, and what to do next. Exit code 1: it failed."""
    from tandem.runs.explain import explain_run, explain_text

    if is_run_id(run):
        from tandem.client import Tandem

        with Tandem() as server:
            found = explain_remote(server.run(run))
    else:
        found = explain_run(run)
    echo(json.dumps(found, indent=2) if as_json else "\n".join(explain_text(found)))
    if found["state"] == "failed":
        raise typer.Exit(1)


def report(
    run: RunOrDir,
    beside: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="RUN", help="Draw this run's curves, too, in report-beside.html. Repeatable."),
    ] = None,
) -> None:
    """Rewrite report.html and curves.png of a run."""
    from tandem.obs.report import write_report

    echo(write_report(run_directory(run), beside or ()))


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two or more run directories or ids.")],
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Confidence of the intervals.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Compare runs with the first one: specs, paired evaluations, curves, time and memory."""
    from tandem.runs.compare import compare_json, compare_runs, compare_text

    found = compare_runs([run_directory(each) for each in runs], confidence=confidence)
    echo(json.dumps(compare_json(found), indent=2) if as_json else compare_text(found))
