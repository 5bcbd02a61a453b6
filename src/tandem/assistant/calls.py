"""What every tool shares: hints for the client, errors as sentences, and the control server of the caller."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

from tandem.assistant.desk import Desk
from tandem.assistant.spending import Yes
from tandem.client import Tandem
from tandem.errors import TandemError

P = ParamSpec("P")
R = TypeVar("R")
DeskFor = Callable[[Any], Desk]
"""Returns the desk of a request's caller, from the request's context."""

READS = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
ASKS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True)
ADDS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False)
ENDS = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True)
TALKS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=True)
"""It asks a model, whose answer is anybody's text."""

_LONGEST_ERROR = 2000


def said(tool: Callable[P, R]) -> Callable[P, R]:
    """Our errors are sentences, which the model gets; other errors stay what they are."""

    @wraps(tool)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return tool(*args, **kwargs)
        except TandemError as error:
            raise ToolError(str(error)[:_LONGEST_ERROR]) from error

    return call


def server_at(desk: Desk) -> AbstractContextManager[Tandem]:
    """Return a client of the control server; an error that says how to choose one if there is none."""
    return desk.server() or Tandem()


def refused(answer: Yes) -> None:
    if not answer.yes:
        raise ToolError("the person said no; do not ask again")
