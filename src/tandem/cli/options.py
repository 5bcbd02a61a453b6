"""Options that several files of the command line share, so that each says the same wherever it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: --set train.lr=1e-4")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON, and nothing else on stdout.")]
Host = Annotated[str, typer.Option(help="Where to listen; loopback unless you say otherwise.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one; the ready file says which.")]
ReadyFile = Annotated[Path | None, typer.Option(help="Written when the server listens: url, pid, token_file.")]
Insecure = Annotated[bool, typer.Option(help="Allow a public address without TLS.")]
Thinking = Annotated[bool, typer.Option("--thinking/--no-thinking", help="Render the chat template with thinking on.")]
