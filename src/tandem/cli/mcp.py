"""`tandem mcp`: runs for an assistant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mcp(
    runs: Annotated[Path, typer.Option(help="Directory that holds the runs it may read.")] = Path("runs"),
) -> None:
    """Let an assistant look at runs, over the Model Context Protocol on stdin and stdout. It asks before it spends."""
    from tandem.io.extras import require_extra

    require_extra("mcp", "mcp")
    from tandem.assistant.server import mcp_server

    mcp_server(runs).run("stdio")
