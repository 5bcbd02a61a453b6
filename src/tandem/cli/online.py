"""`tandem online ...`: serve a model that learns while it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.options import Host, Insecure, Overrides, Port, ReadyFile

online_app = typer.Typer(help="Serve a model that learns while it answers.", no_args_is_help=True)


@online_app.command("serve")
def online_serve(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="TOML file, as in examples/online.toml.")],
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8300,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Directory for versions, jobs and tokens; give it again to resume. Default: .tandem/online."),
    ] = None,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
) -> None:
    """Answer OpenAI requests with a model that trains on the samples sent to POST /train."""
    from tandem.spec.online import load_online_spec

    checked = load_online_spec(spec, overrides or ())  # before heavy imports: a wrong spec is refused at once
    from tandem.recipes.online import default_data_dir, serve_online
    from tandem.serve.http.run import Listen

    serve_online(checked, Listen(data_dir or default_data_dir(), host, port, ready_file, insecure))
