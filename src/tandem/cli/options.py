"""Options that several commands share, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the spec: --set train.lr=1e-4"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
Host = Annotated[str, typer.Option(help="Address to listen on. Default: 127.0.0.1.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one, which the ready file names.")]
ReadyFile = Annotated[
    Path | None, typer.Option(help="JSON file written when the server listens: url, pid, token_file.")
]
Insecure = Annotated[bool, typer.Option(help="Allow a public address without TLS.")]
Thinking = Annotated[bool, typer.Option("--thinking/--no-thinking", help="Render the chat template with thinking on.")]
