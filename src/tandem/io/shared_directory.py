"""Whether ranks on other hosts see the run's directory: rank 0 writes a token into it, and each of them reads it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

_LOOK_S = 0.2
ENOUGH_S = 5.0
"""A network file system may show a new file late."""


@contextmanager
def token_in(directory: Path) -> Generator[str]:
    """Yield a token that the directory has until the block ends."""
    token = secrets.token_hex(8)
    file = directory / f".token-{token}"  # a new name: a network file system remembers which names were missing
    file.touch()
    try:
        yield token
    finally:
        file.unlink(missing_ok=True)


def why_unseen(directory: Path, token: str, tick: Callable[[], None] = lambda: None) -> str:
    """Return why this is not the directory that has the token; empty if it is."""
    until = time.monotonic() + ENOUGH_S
    while True:
        try:
            (directory / f".token-{token}").stat()
            return ""
        except FileNotFoundError as error:
            known = directory.exists()
            why = f"{directory.absolute()}{' is another directory here' if known else f': {error.strerror}'}"
        except OSError as error:
            why = f"{directory.absolute()}: {error.strerror or error}"
        if time.monotonic() > until:
            return why
        tick()
        time.sleep(_LOOK_S)
