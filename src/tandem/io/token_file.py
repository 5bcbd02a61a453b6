"""A file that holds the token of a service."""

from __future__ import annotations

from pathlib import Path

from tandem.errors import SpecError


def read_token(file: Path, option: str) -> str:
    """OSError if it cannot be read. What else it may hold is never told: it may be a secret of another kind."""
    token = file.read_bytes().strip()
    if not token or not all(33 <= byte < 127 for byte in token):
        raise SpecError(f"{option} = '{file}': holds no token, which is one line of letters and digits")
    return token.decode()


def named_token(file: Path, option: str = "--token-file") -> str:
    """Of a file that a user named: SpecError as well if it cannot be read."""
    try:
        return read_token(file, option)
    except OSError as error:
        raise SpecError(f"{option} = '{file}': cannot be read: {error.strerror}") from error
