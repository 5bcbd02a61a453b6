"""`tandem sync ...`: audit, inspect and benchmark weight syncs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.cli.options import AsJson, echo
from tandem.cli.remote import RunOrDir
from tandem.runs.named_runs import run_directory

sync_app = typer.Typer(
    help="Audit, inspect and benchmark the weight syncs from trainer to engine.", no_args_is_help=True
)


@sync_app.command("audit")
def sync_audit(run: RunOrDir, as_json: AsJson = False) -> None:
    """Print each version's proof that the engines served it. Exit code 1: a version has no proof."""
    from tandem.obs.sync_audit import audit_sync
    from tandem.obs.sync_report import audit_json, audit_text

    audit = audit_sync(run_directory(run))
    echo(json.dumps(audit_json(audit), indent=2) if as_json else audit_text(audit))
    if not audit.proven:
        raise typer.Exit(1)


@sync_app.command("status")
def sync_status(
    source: Annotated[str, typer.Argument(metavar="RUN|URL", help="A run directory, or the URL of an engine.")],
    token_file: Annotated[Path | None, typer.Option(help="With a URL: file with its token.")] = None,
    last: Annotated[int, typer.Option(min=0, help="How many of the newest proofs to show.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Show how trainer and engines are connected, and the last proofs."""
    from tandem.obs.sync_report import status_text
    from tandem.obs.sync_status import sync_status

    status = sync_status(source, token_file=token_file, last=last)
    echo(json.dumps(status, indent=2) if as_json else status_text(status))


@sync_app.command("bench")
def sync_bench(
    shape: Annotated[
        str, typer.Option(help="Model, with random weights: tiny, small, medium, qwen3-0.6b or qwen3-1.7b.")
    ] = "tiny",
    bridges: Annotated[
        list[str] | None, typer.Option("--bridge", help="Bridge to measure; repeatable. Default: all bridges.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device of trainer and engine; auto takes a GPU if present.")
    ] = "auto",
    engine: Annotated[
        Literal["auto", "server", "vllm"], typer.Option(help="Engine in the other process; auto: vllm on a GPU.")
    ] = "auto",
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a field of the engine table: --set start_deadline_s=900."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Syncs to measure per bridge.")] = 5,
    png: Annotated[Path | None, typer.Option(help="Also draw the table to this PNG file. Default: no picture.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure each bridge that this machine supports. Exit code 1: a sync failed or has no proof."""
    from tandem.io.atomic_write import write_bytes
    from tandem.obs.sync_bench_report import bench_json, bench_png, bench_text
    from tandem.recipes.sync_bench import bench_sync
    from tandem.spec.load import parse_overrides

    bench = bench_sync(
        shape,
        bridges or (),
        device=device,
        engine=engine,
        rounds=rounds,
        options=parse_overrides(option or ()),
        tell=lambda text: echo(text, err=True),
    )
    echo(json.dumps(bench_json(bench), indent=2) if as_json else bench_text(bench))
    if png is not None:
        write_bytes(png, bench_png(bench))
    if bench.failed:
        raise typer.Exit(1)
