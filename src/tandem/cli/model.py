"""`tandem model ...`: look at a model before it is trained."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tandem.cli.options import AsJson, echo

model_app = typer.Typer(help="Look at a model before it is trained.", no_args_is_help=True)


@model_app.callback()
def model() -> None:
    """Look at a model before it is trained."""


@model_app.command("check")
def model_check(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="Directory of a model or adapter, GGUF file, hub id.")],
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Data type of the weights.")] = "float32",
    gpu: Annotated[
        str,
        typer.Option(help="Memory to plan for: none, GiB such as 24, or a card such as 4090. Default: this machine."),
    ] = "",
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of a hub id.")] = "main",
    as_json: AsJson = False,
) -> None:
    """Say what a model is, what it fits, and whether trainer and engine agree on an answer. Exit code 1: a finding."""
    from tandem.recipes.model_check import check_model

    check = check_model(source, dtype=dtype, gpu=gpu, revision=revision)
    echo(check.as_json() if as_json else str(check))
    if not check.passed:
        raise typer.Exit(1)
