"""`tandem feedback`: write the thumbs of users as rows to train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.cli.options import AsJson, echo


def feedback_command(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Data directory of a service, or the run it served.")],
    kind: Annotated[
        Literal["pairs", "labels", "sft"],
        typer.Option(
            "--as",
            help="Rows to write. pairs: better and worse answers; labels: answers with a label; sft: good answers.",
        ),
    ] = "pairs",
    out: Annotated[Path | None, typer.Option(help="JSONL file to write. Default: only say what there is.")] = None,
    good_from: Annotated[
        float | None, typer.Option(help="Least value of a good answer. Default: 0.5, if no value is above 1.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many chats of a service were rated; with --out, write them as rows to train on."""
    from tandem.io.chat_feedback import count_feedback, feedback_rows, write_rows

    found = count_feedback(source)
    rows = feedback_rows(source, kind, good_from=good_from)
    if out is not None:
        write_rows(rows, out)
    if as_json:
        return echo(json.dumps({**found, "rows": len(rows), "out": str(out) if out else None}))
    echo(f"{found['chats']} chats, {found['rated']} rated, {found['better']} with a better answer")
    echo(f"{len(rows)} rows as {kind}" + (f" in {out}" if out else "; --out FILE writes them"))
