"""Read TOML files of users; errors name the file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from tandem.errors import SpecError


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file. SpecError if the file cannot be read or is not TOML."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise SpecError(
            f"{path}: cannot be read ({error.strerror}); give the path of a spec, as in examples/quickstart.toml"
        ) from error
    try:
        return parse_toml(raw.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is not TOML: {error}") from error


def parse_toml(text: str, where: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML text; `where` names it in errors."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where}: is not TOML: {error}") from error
    except RecursionError:  # "from None": the traceback would have a thousand frames
        raise SpecError(f"{where}: is not a spec: tables and lists are nested too deeply") from None
