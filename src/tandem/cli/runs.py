"""`tandem runs` and `tandem env list`: what there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.options import AsJson


def runs(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Directory that holds runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs in a directory, the newest last: state, verdict, step, reward or loss, evaluation."""
    from tandem.runs.run_list import list_runs, runs_text

    found = list_runs(directory)
    typer.echo(json.dumps(found, indent=2) if as_json else runs_text(found))


def env_list(as_json: AsJson = False) -> None:
    """List the environments that have a name; your own are a file or a module: `tandem env new NAME`."""
    from tandem.env.catalog import list_environments

    found = list_environments()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(len(each["name"]) for each in found) + 2
    for each in found:
        typer.echo(f"{each['name']:<{width}}{each['about']}")
