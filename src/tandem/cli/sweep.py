"""`tandem sweep`: one spec with several seeds or values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.options import Overrides


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="TOML file, as in examples/sweep.toml.")],
    seeds: Annotated[
        str, typer.Option(metavar="N,N,...", help="Seeds, as in --seeds 0,1,2. Default: those of the spec.")
    ] = "",
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V,V,...",
            help="Values of a setting, as in --over train.lr=1e-5,3e-5; all combinations are run. Repeatable.",
        ),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(min=1, help="Draw so many combinations; a range of --over is then low..high. Default: run all."),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory of the sweep; give it again to resume. Default: a new one.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train SPEC once per seed and per combination of values; report a table and a picture. Exit code 1: one failed."""
    from tandem.spec.load import load_spec, parse_over, parse_seeds

    numbers, values = parse_seeds(seeds) if seeds else None, parse_over(over) if over else None
    checked = load_spec(spec, overrides or ())
    from tandem.recipes.sweep import sweep

    if sweep(checked, numbers, directory, over=values, random=random).failed:
        raise typer.Exit(1)
