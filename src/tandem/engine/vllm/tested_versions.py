"""The versions of vLLM that have passed the conformance suite, on this machine or before Tandem's release."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, cast

from tandem.errors import EngineError
from tandem.io import atomic_write

PASSED = ("0.26.0", "0.32.0")
_RECORD = "tandem-engine.json"


def refuse_unknown_version(version: str, python: str) -> None:
    plain = version.partition("+")[0]
    known = sorted({*PASSED, *passed_here(python)})
    if plain not in known:
        raise EngineError(
            f"engine: vLLM {version} has not passed the conformance suite; {', '.join(known)} have. Run `tandem engine "
            f"check --python {python}`, or install one of these with `tandem engine install vllm`"
        )


def is_since(version: str, major: int, minor: int) -> bool:
    """Return whether a version is at least `major.minor`, pre-releases included."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= (major, minor)


def version_of(python: str) -> str:
    """Return the vLLM version of an interpreter. Reads the package's metadata without importing it."""
    try:
        asked = subprocess.run(
            [python, "-c", "from importlib.metadata import version; print(version('vllm'))"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(
            f"engine.python = '{python}': cannot be run ({error}); `tandem engine install vllm` creates a working one"
        ) from error
    if asked.returncode:
        raise EngineError(f"engine.python = '{python}': has no vLLM; `tandem engine install vllm` creates one with it")
    return asked.stdout.strip()


def has_package(python: str, name: str) -> bool:
    """Return whether an interpreter finds a package, without importing it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{name}') is None)"
    return subprocess.run([python, "-c", code], timeout=60, check=False).returncode == 0


def passed_here(python: str) -> list[str]:
    """Return the versions that `tandem engine check` recorded beside this interpreter."""
    path = _record(python)
    if not path.is_file():
        return []
    found = cast("Any", json.loads(path.read_text(encoding="utf-8")))
    return [str(version) for version in found.get("passed", [])] if isinstance(found, dict) else []


def record(python: str, version: str, checks: list[str]) -> Path:
    """Record that this version passed these checks in this environment."""
    passed = sorted({*passed_here(python), version.partition("+")[0]})
    path = _record(python)
    atomic_write.write_json(path, {"passed": passed, "checks": checks})
    return path


def _record(python: str) -> Path:
    return Path(python).absolute().parent.parent / _RECORD
