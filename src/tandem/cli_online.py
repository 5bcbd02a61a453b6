"""`tandem online ...`: a server that learns while it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

online_app = typer.Typer(help="A server that learns while it answers.", no_args_is_help=True)


@online_app.command("serve")
def online_serve(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A TOML file, as in examples/online.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: --set train.lr=1e-4")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; loopback unless you say otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one; the ready file says which.")] = 8300,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Keeps versions, jobs and tokens: named again, it goes on. Default: .tandem/online."),
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Written when the server listens: url, pid, token_file.")
    ] = None,
    insecure: Annotated[bool, typer.Option(help="Allow a public address without TLS.")] = False,
) -> None:
    """Answer OpenAI requests with a model that learns from what POST /train brings, version by version."""
    from tandem.spec.online import load_online_spec

    checked = load_online_spec(spec, overrides or ())  # before anything heavy: a wrong spec is refused at once
    from tandem.recipes.online import default_data_dir, serve_online
    from tandem.serve.run import Listen

    serve_online(checked, Listen(data_dir or default_data_dir(), host, port, ready_file, insecure))
