"""`tandem env check`: an environment's splits and demonstrations, and a model's base rate before it is trained."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tandem.cli.options import AsJson


def env_check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|ENV", help="TOML file of an RL run, or arithmetic, sort, guess, package.module:Class, a file."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Model directory, run or hub id. Default: the spec's. Where there is none, or one that is made from "
            "scratch, demonstrations are played instead."
        ),
    ] = "",
    tasks: Annotated[int, typer.Option(min=2, help="Training tasks to play.")] = 32,
    answers: Annotated[int, typer.Option(min=2, help="Answers to each task.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of an answer; 0: the spec's, or 256.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0: the spec's, or 1.")] = 0.0,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a field of SPEC, or a parameter of ENV. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how often a model earns a reward before it is trained. Without a model: check splits and demonstrations.
    Exit code 1: there is too little to learn from."""
    from tandem.spec.load import load_spec, parse_overrides
    from tandem.spec.model import PathModel
    from tandem.spec.run import RlSpec

    is_spec = source.endswith(".toml")
    checked = load_spec(source, setting or ()) if is_spec else source  # a wrong spec is refused before torch comes
    params = None if is_spec else parse_overrides(setting or ())
    if not model and not (isinstance(checked, RlSpec) and isinstance(checked.model, PathModel)):
        from tandem.recipes.demonstration_check import check_demonstrations

        shown = check_demonstrations(checked, params=params)
        typer.echo(json.dumps(shown.row()) if as_json else shown.text())
        if not shown.passed:
            raise typer.Exit(1)
        return
    from tandem.recipes.base_rate import measure_base_rate

    found = measure_base_rate(
        checked,
        model,
        params=params,
        tasks=tasks,
        group_size=answers,
        max_tokens=max_tokens,
        temperature=temperature,
    )
    typer.echo(json.dumps(found.row()) if as_json else found.text())
    if not found.passed:
        raise typer.Exit(1)
