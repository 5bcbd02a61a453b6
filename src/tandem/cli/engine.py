"""`tandem engine ...`: serve, install and check engines that run in their own process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.cli.options import EngineTable, Host, Insecure, Port, ReadyFile, Thinking, echo

engine_app = typer.Typer(help="Serve an engine in its own process; install and check vLLM.", no_args_is_help=True)


@engine_app.command("serve")
def engine_serve(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model directory, a hub id, or a run directory. @FILE: wait for FILE, then load the model it names.",
        ),
    ],
    kind: Annotated[
        Literal["server", "vllm"], typer.Option(help="server: the embedded engine. vllm: vLLM.")
    ] = "server",
    version: Annotated[
        int | None, typer.Option(min=0, help="Version number of the weights on disk. Default: the run's steps, or 0.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory for the token. Default: serve/ in the run, or .tandem/serve.")
    ] = None,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    option: EngineTable = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device to compute on; auto takes a GPU if there is one.")
    ] = "auto",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Data type of the weights.")] = "float32",
    thinking: Thinking = False,
    adapter_slots: Annotated[
        int, typer.Option(min=0, help="With vllm: adapter versions in use at one time; 0 serves no adapters.")
    ] = 0,
    max_rank: Annotated[int, typer.Option(min=1, help="With vllm: highest adapter rank.")] = 16,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="With vllm: accept a vLLM version that `engine check` has not passed.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another machine whose trainer may send weights. Default: this one only.")
    ] = None,
    allow_dir: Annotated[
        list[Path] | None, typer.Option(help="Directory, with its subdirectories, to read weights from. Repeatable.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="With vllm: the directory of a run's images, for a model that sees.")
    ] = None,
) -> None:
    """Serve an engine whose weights a trainer in another process updates. Clients use /v1, as with `serve`."""
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
        images=images,
    )


@engine_app.command("install")
def engine_install(
    engine: Annotated[Literal["vllm"], typer.Argument(metavar="vllm", help="Which engine: vllm.")],
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIRECTORY", help="Directory to create. Default: .tandem/vllm, where runs look for it."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device to install for; auto takes a GPU if there is one.")
    ] = "auto",
    version: Annotated[str, typer.Option(help="vLLM version. Default: one that passed the conformance suite.")] = "",
) -> None:
    """Create a separate Python environment with vLLM and print the path of its interpreter."""
    from tandem.recipes.engine_commands import install_engine

    echo(install_engine(directory, device=device, version=version, tell=_to_stderr))


@engine_app.command("check")
def engine_check(
    python: Annotated[str, typer.Option(help="vLLM's interpreter. Default: the one of `engine install vllm`.")] = "",
    model: Annotated[
        str,
        typer.Option(help="Check that vLLM computes this model as the trainer does: directory, GGUF file or hub id."),
    ] = "",
    bridge: Annotated[
        list[str] | None,
        typer.Option(help="With --model: bridge to check; repeatable. Default: the one of a run on this device."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device of trainer and engine; auto takes a GPU if present.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="With --model: data type of the weights. auto: bfloat16 on a GPU, else float32."),
    ] = "auto",
    target: Annotated[
        list[str] | None,
        typer.Option(help="With --bridge adapter: a layer to adapt, as in model.lora.targets; repeatable."),
    ] = None,
    option: EngineTable = None,
) -> None:
    """Run the conformance suite on an installed vLLM, and record its version if it passes; or compare one model's
    logprobs there with the trainer's. Exit code 1: it failed."""
    from tandem.recipes.engine_commands import check_engine
    from tandem.spec.load import parse_overrides

    options = parse_overrides(option or ())
    check = check_engine(
        python, model=model, bridges=bridge or (), device=device, dtype=dtype, options=options, targets=target or (),
        tell=echo,
    )  # fmt: skip
    if not check.passed:
        raise typer.Exit(1)


def _to_stderr(text: str) -> None:
    echo(text, err=True)
