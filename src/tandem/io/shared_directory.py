"""Whether ranks on other hosts see the run's directory: rank 0 writes a token into it, and each of them reads it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

_NAME = ".token"
_LOOK_S = 0.2
ENOUGH_S = 5.0
"""A network file system may show a new file late."""


@contextmanager
def token_in(directory: Path) -> Generator[str]:
    """Yield a token that the directory has until the block ends."""
    token, file = secrets.token_hex(8), directory / _NAME
    file.write_text(token)
    try:
        yield token
    finally:
        file.unlink(missing_ok=True)


def why_unseen(directory: Path, token: str, tick: Callable[[], None] = lambda: None) -> str:
    """Return why this is not the directory that has the token; empty if it is."""
    until = time.monotonic() + ENOUGH_S
    while True:
        try:
            found = (directory / _NAME).read_text()
            why = "" if found == token else f"{directory.absolute()} is another directory here"
        except OSError as error:
            why = f"{directory.absolute()}: {error.strerror or error}"
        if not why or time.monotonic() > until:
            return why
        tick()
        time.sleep(_LOOK_S)
