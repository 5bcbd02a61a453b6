"""`tandem artifacts ...`: upload, list and download copies of runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.options import AsJson, echo

artifacts_app = typer.Typer(help="Upload, list and download copies of runs.", no_args_is_help=True)


@artifacts_app.command("push")
def artifacts_push(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    url: Annotated[
        str, typer.Option(help="A directory or s3://bucket/prefix. Default: artifacts.url of the spec.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Upload a run's artifacts that are not in the store yet. Exit code 1: at least one upload failed."""
    from tandem.runs.uploads import push_artifacts

    done = push_artifacts(run_dir, url=url)
    if as_json:
        echo(json.dumps([asdict(upload) for upload in done], indent=2))
    for upload in () if as_json else done:
        echo(f"{upload.state}  {upload.name}  {upload.size_bytes:,} bytes  {upload.error}".rstrip())
    if any(upload.state == "failed" for upload in done):
        raise typer.Exit(1)


@artifacts_app.command("list")
def artifacts_list(
    url: Annotated[str, typer.Argument(metavar="URL", help="A directory, or s3://bucket/prefix.")],
    endpoint: Annotated[str, typer.Option(help="URL of an S3-compatible server. Default: Amazon's.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the complete artifacts of a store, with their sizes."""
    from tandem.runs.artifacts import list_artifacts

    found = list_artifacts(url, endpoint=endpoint)
    if as_json:
        return echo(json.dumps([asdict(artifact) for artifact in found], indent=2))
    for artifact in found:
        echo(f"{artifact.name}  {artifact.size_bytes:,} bytes in {len(artifact.entries)} files")


@artifacts_app.command("fetch")
def artifacts_fetch(
    url: Annotated[str, typer.Argument(metavar="URL", help="A directory, or s3://bucket/prefix.")],
    name: Annotated[str, typer.Argument(help="The artifact's name, as `tandem artifacts list` prints it.")],
    directory: Annotated[Path, typer.Argument(help="Where to write it; must not exist yet.")],
    endpoint: Annotated[str, typer.Option(help="URL of an S3-compatible server. Default: Amazon's.")] = "",
) -> None:
    """Download an artifact and verify its digests."""
    from tandem.runs.artifacts import fetch_artifact

    echo(fetch_artifact(url, name, directory, endpoint=endpoint))
