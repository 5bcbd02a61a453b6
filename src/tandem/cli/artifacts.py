"""`tandem artifacts ...`: store copies of runs elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.options import AsJson

artifacts_app = typer.Typer(help="Store copies of runs outside their machine.", no_args_is_help=True)


@artifacts_app.command("push")
def artifacts_push(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    url: Annotated[str, typer.Option(help="Target: a directory or s3://bucket/prefix. Default: the spec's.")] = "",
) -> None:
    """Upload the artifacts that a run's spec names and that are not stored yet. Exit code 1 if one failed."""
    from tandem.runs.uploads import push_artifacts

    done = push_artifacts(run_dir, url=url)
    for upload in done:
        typer.echo(f"{upload.state}  {upload.name}  {upload.size_bytes:,} bytes  {upload.error}".rstrip())
    if any(upload.state == "failed" for upload in done):
        raise typer.Exit(1)


@artifacts_app.command("list")
def artifacts_list(
    url: Annotated[str, typer.Argument(metavar="URL", help="Directory or s3://bucket/prefix.")],
    endpoint: Annotated[str, typer.Option(help="URL of an S3-compatible server.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the complete artifacts of a store."""
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
    url: Annotated[str, typer.Argument(metavar="URL", help="Directory or s3://bucket/prefix.")],
    name: Annotated[str, typer.Argument(help="Name, as printed by `tandem artifacts list`.")],
    directory: Annotated[Path, typer.Argument(help="Target directory; must not exist yet.")],
    endpoint: Annotated[str, typer.Option(help="URL of an S3-compatible server.")] = "",
) -> None:
    """Download an artifact and verify it."""
    from tandem.runs.artifacts import fetch_artifact

    typer.echo(fetch_artifact(url, name, directory, endpoint=endpoint))
