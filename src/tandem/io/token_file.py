"""Read the token file of a service."""

from __future__ import annotations

from pathlib import Path

from tandem.errors import SpecError


def read_token(file: Path, option: str) -> str:
    """Return the token. OSError if the file cannot be read. Errors never quote its content, which may be another
    secret."""
    token = file.read_bytes().strip()
    if not token or not all(33 <= byte < 127 for byte in token):
        raise SpecError(f"{option} = '{file}': contains no token; a token is one line of letters and digits")
    return token.decode()


def named_token(file: Path, option: str = "--token-file") -> str:
    """Return the token of a file that the user named; SpecError if it cannot be read."""
    try:
        return read_token(file, option)
    except OSError as error:
        raise SpecError(f"{option} = '{file}': cannot be read: {error.strerror}") from error
