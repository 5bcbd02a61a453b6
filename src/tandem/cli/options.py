"""Command-line options that several commands share, with the same help text in each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one value of the spec, as in --set train.lr=1e-4. Repeatable."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
Host = Annotated[str, typer.Option(help="Address to listen on. Only this machine can reach the default.")]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0 takes a free port, which the ready file names.")
]
ReadyFile = Annotated[
    Path | None, typer.Option(help="JSON file to write once the server listens: url, pid, token_file. Default: none.")
]
Insecure = Annotated[bool, typer.Option(help="Allow a --host that other machines reach, without TLS.")]
Thinking = Annotated[
    bool, typer.Option("--thinking/--no-thinking", help="Render the chat template with thinking on or off.")
]


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"tandem {version('tandem-rl')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]
