"""`tandem sync ...`: proofs, state and cost of weight syncs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.cli.options import AsJson

sync_app = typer.Typer(help="Weight syncs: proofs, current state, cost of each bridge.", no_args_is_help=True)


@sync_app.command("audit")
def sync_audit(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, finished or not.")],
    as_json: AsJson = False,
) -> None:
    """Show for each version the proof that the engines served it. Exit code 1 if one is missing."""
    from tandem.obs.sync_audit import audit_sync
    from tandem.obs.sync_report import audit_json, audit_text

    audit = audit_sync(run_dir)
    typer.echo(json.dumps(audit_json(audit), indent=2) if as_json else audit_text(audit))
    if not audit.proven:
        raise typer.Exit(1)


@sync_app.command("status")
def sync_status(
    source: Annotated[str, typer.Argument(metavar="RUN|URL", help="Run directory, or URL of an engine.")],
    token_file: Annotated[Path | None, typer.Option(help="With a URL: file with its token.")] = None,
    last: Annotated[int, typer.Option(min=0, help="Number of proofs to show.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Show how trainer and engines are joined, and the last proofs."""
    from tandem.obs.sync_report import status_text
    from tandem.obs.sync_status import sync_status

    told = sync_status(source, token_file=token_file, last=last)
    typer.echo(json.dumps(told, indent=2) if as_json else status_text(told))


@sync_app.command("bench")
def sync_bench(
    shape: Annotated[
        str, typer.Option(help="tiny, small or medium (presets), qwen3-0.6b or qwen3-1.7b: random weights.")
    ] = "tiny",
    bridges: Annotated[
        list[str] | None,
        typer.Option("--bridge", help="Measure only this bridge; may be given several times. Default: all."),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device of trainer and engine.")] = "auto",
    engine: Annotated[
        Literal["auto", "server", "vllm"],
        typer.Option(help="Engine in the other process; auto: vLLM on a GPU, else server."),
    ] = "auto",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set a field of the spec's engine table: --set start_deadline_s=900"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements per bridge.")] = 5,
    png: Annotated[Path | None, typer.Option(help="Draw the table to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what each bridge costs on this machine. Exit code 1 if a sync is not proven."""
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
        tell=lambda text: typer.echo(text, err=True),
    )
    typer.echo(json.dumps(bench_json(bench), indent=2) if as_json else bench_text(bench))
    if png is not None:
        write_bytes(png, bench_png(bench))
    if bench.failed:
        raise typer.Exit(1)
