"""`tandem engine ...`: engines in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.cli.options import Host, Insecure, Port, ReadyFile, Thinking

engine_app = typer.Typer(help="Engines in processes of their own.", no_args_is_help=True)


@engine_app.command("serve")
def engine_serve(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model directory, a hub id, or a run directory. @FILE: start now, and load what FILE will name.",
        ),
    ],
    kind: Annotated[Literal["server", "vllm"], typer.Option(help="The embedded engine, or vLLM.")] = "server",
    version: Annotated[
        int | None, typer.Option(min=0, help="Of the weights on the disk. Default: a run's steps, else 0.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keeps the token. Default: serve/ in a run, else .tandem/serve.")
    ] = None,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="As in a spec's engine table: --set max_running=64"),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where it computes.")] = "auto",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="What the weights are held in.")] = "float32",
    thinking: Thinking = False,
    adapter_slots: Annotated[
        int, typer.Option(min=0, help="With vllm: versions of an adapter in use at a time; 0 for none.")
    ] = 0,
    max_rank: Annotated[int, typer.Option(min=1, help="With vllm: the highest rank of an adapter.")] = 16,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="With vllm: also a version that `engine check` has not passed.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A trainer's machine that versions may come from, beyond this one.")
    ] = None,
    allow_dir: Annotated[
        list[Path] | None, typer.Option(help="A directory that versions may be read from, with all below it.")
    ] = None,
) -> None:
    """Serve an engine that a trainer in another process keeps in step; users ask it at /v1, as with `serve`."""
    from tandem.recipes.serve import default_data_dir, serve_engine
    from tandem.serve.http.run import Listen
    from tandem.spec.load import parse_engine

    serve_engine(
        source,
        Listen(data_dir or default_data_dir(source), host, port, ready_file, insecure),
        parse_engine(kind, option or ()),
        version=version,
        device=device,
        dtype=dtype,
        thinking=thinking,
        adapter_slots=adapter_slots,
        max_rank=max_rank,
        unchecked=unchecked,
        allow_hosts=allow_host or (),
        allow_directories=allow_dir or (),
    )


@engine_app.command("install")
def engine_install(
    engine: Annotated[Literal["vllm"], typer.Argument(metavar="vllm", help="Which engine: vllm.")],
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIRECTORY", help="Where it goes; default .tandem/vllm, where runs look.")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="What it is to compute on.")] = "auto",
    version: Annotated[str, typer.Option(help="Of vLLM. Default: one that has passed the conformance suite.")] = "",
) -> None:
    """Make a Python environment for vLLM, apart from this one, and print its interpreter."""
    from tandem.recipes.engine_commands import install_engine

    typer.echo(install_engine(directory, device=device, version=version, tell=_to_stderr))


@engine_app.command("check")
def engine_check(
    python: Annotated[str, typer.Option(help="vLLM's interpreter. Default: where `engine install vllm` puts it.")] = "",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where trainer and engine compute.")] = "auto",
) -> None:
    """Run the conformance suite with an installed vLLM; record its version if all passed, else exit code 1."""
    from tandem.recipes.engine_commands import check_engine

    if not check_engine(python, device=device, tell=typer.echo).passed:
        raise typer.Exit(1)


def _to_stderr(text: str) -> None:
    typer.echo(text, err=True)
