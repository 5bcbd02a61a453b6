"""`tandem engine ...`: serve, install and check engines in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.cli.options import Host, Insecure, Port, ReadyFile, Thinking

engine_app = typer.Typer(help="Run engines in processes of their own.", no_args_is_help=True)


@engine_app.command("serve")
def engine_serve(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, hub id or run directory. @FILE: start now and load the model that FILE will name.",
        ),
    ],
    kind: Annotated[
        Literal["server", "vllm"], typer.Option(help="server: the embedded engine; vllm: vLLM.")
    ] = "server",
    version: Annotated[
        int | None, typer.Option(min=0, help="Version number of the weights on disk. Default: a run's steps, else 0.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory for the token file. Default: serve/ in a run, else .tandem/serve.")
    ] = None,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a field of the spec's engine table: --set max_running=64"),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device to compute on.")] = "auto",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Data type of the weights.")] = "float32",
    thinking: Thinking = False,
    adapter_slots: Annotated[
        int, typer.Option(min=0, help="With vllm: adapter versions in use at the same time; 0 disables adapters.")
    ] = 0,
    max_rank: Annotated[int, typer.Option(min=1, help="With vllm: maximum rank of an adapter.")] = 16,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="With vllm: allow a vLLM version that `engine check` has not passed.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Allow weight updates from a trainer on this host, besides this machine.")
    ] = None,
    allow_dir: Annotated[
        list[Path] | None, typer.Option(help="Allow weight updates to be read from this directory and below.")
    ] = None,
) -> None:
    """Serve an engine whose weights a trainer in another process updates; users call /v1, as with `serve`."""
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
        Path | None,
        typer.Argument(metavar="DIRECTORY", help="Target directory. Default: .tandem/vllm, where runs look for it."),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device that vLLM will compute on.")] = "auto",
    version: Annotated[
        str, typer.Option(help="vLLM version. Default: one that has passed the conformance suite.")
    ] = "",
) -> None:
    """Install vLLM into a Python environment of its own and print the path of its interpreter."""
    from tandem.recipes.engine_commands import install_engine

    typer.echo(install_engine(directory, device=device, version=version, tell=_to_stderr))


@engine_app.command("check")
def engine_check(
    python: Annotated[
        str, typer.Option(help="Python interpreter of vLLM. Default: the one that `engine install vllm` made.")
    ] = "",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device of trainer and engine.")] = "auto",
) -> None:
    """Run the conformance suite with an installed vLLM and record its version if all passed. Exit code 1 if not."""
    from tandem.recipes.engine_commands import check_engine

    if not check_engine(python, device=device, tell=typer.echo).passed:
        raise typer.Exit(1)


def _to_stderr(text: str) -> None:
    typer.echo(text, err=True)
