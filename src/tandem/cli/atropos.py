"""`tandem atropos`: train on Atropos environments; one command starts every process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.options import Overrides, echo


def atropos(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="TOML file, as in examples/atropos.toml.")],
    run_dir: Annotated[
        Path | None, typer.Option(help="Run directory; give an earlier one to resume it. Default: runs/<name>-<time>.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train on Atropos environments: starts the engine, gateway, rollout service, trainer and environments."""
    from tandem.spec.load import load_spec

    checked = load_spec(spec, overrides or ())
    from tandem.recipes.atropos_run import run_atropos

    run_atropos(checked, run_dir, tell=echo)
