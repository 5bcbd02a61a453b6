"""`tandem artifacts ...`: copies of runs elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.options import AsJson

artifacts_app = typer.Typer(help="Copies of runs that outlive their machine.", no_args_is_help=True)


@artifacts_app.command("push")
def artifacts_push(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    url: Annotated[str, typer.Option(help="Where to: a directory, s3://bucket/prefix. Default: the spec's.")] = "",
) -> None:
    """Upload what a run's spec names under artifacts and is not there yet. Exit code 1: something is still missing."""
    from tandem.runs.uploads import push_artifacts

    done = push_artifacts(run_dir, url=url)
    for upload in done:
        typer.echo(f"{upload.state}  {upload.name}  {upload.size_bytes:,} bytes  {upload.error}".rstrip())
    if any(upload.state == "failed" for upload in done):
        raise typer.Exit(1)


@artifacts_app.command("list")
def artifacts_list(
    url: Annotated[str, typer.Argument(metavar="URL", help="A directory, or s3://bucket/prefix.")],
    endpoint: Annotated[str, typer.Option(help="Of an S3-compatible server.")] = "",
    as_json: AsJson = False,
) -> None:
    """Name the artifacts of a store that are whole."""
    from dataclasses import asdict

    from tandem.runs.artifacts import list_artifacts

    found = list_artifacts(url, endpoint=endpoint)
    if as_json:
        typer.echo(json.dumps([asdict(artifact) for artifact in found], indent=2))
        return
    for artifact in found:
        typer.echo(f"{artifact.name}  {artifact.size_bytes:,} bytes in {len(artifact.entries)} files")


@artifacts_app.command("fetch")
def artifacts_fetch(
    url: Annotated[str, typer.Argument(metavar="URL", help="A directory, or s3://bucket/prefix.")],
    name: Annotated[str, typer.Argument(help="As `tandem artifacts list` tells it.")],
    directory: Annotated[Path, typer.Argument(help="Where it goes; must not be there yet.")],
    endpoint: Annotated[str, typer.Option(help="Of an S3-compatible server.")] = "",
) -> None:
    """Download an artifact and verify it."""
    from tandem.runs.artifacts import fetch_artifact

    typer.echo(fetch_artifact(url, name, directory, endpoint=endpoint))
