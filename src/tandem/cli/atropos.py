"""`tandem atropos`: a run whose environments are Atropos's, all of its processes by one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.options import Overrides


def atropos(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A TOML file, as in examples/atropos.toml.")],
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Where the run lives; default runs/<name>-<time>. Name it again to go on with the run."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train on environments of Atropos: starts engine, gateway, rollout service, trainer and environments."""
    from tandem.spec.load import load_spec

    checked = load_spec(spec, overrides or ())
    from tandem.recipes.atropos_run import run_atropos

    run_atropos(checked, run_dir, tell=typer.echo)
