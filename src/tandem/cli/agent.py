"""`tandem agent`: what a control plane starts on a machine."""

from __future__ import annotations

import logging
from typing import Annotated

import typer


def agent(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the attempt, as the control plane gives it.")],
    once: Annotated[bool, typer.Option("--once", help="Do not start the agent again if it is killed.")] = False,
) -> None:
    """Bring one attempt of a run to its end, in this directory. A control plane starts it; its token is in
    TANDEM_ATTEMPT_TOKEN."""
    from tandem.agent.guard import attend, guard

    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    raise typer.Exit(attend(url) if once else guard(url))
