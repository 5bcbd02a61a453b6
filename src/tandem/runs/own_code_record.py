"""Keep which code of the user's own a run used: code.json has the SHA-256 of each file, code/ has a copy.

A resumed run compares, and tells what has changed since.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any, cast

from tandem.io import atomic_write, own_code
from tandem.io.bounded_json import read_json
from tandem.runs.run import Run
from tandem.spec.own import own_names
from tandem.spec.run import RunSpec

FILE = "code.json"


def keep_code(run: Run, spec: RunSpec, version: int) -> None:
    """Record the user's code of this spec. `version`: the step that the run resumes from; 0 at its start."""
    names = dict(own_names(spec))
    if not names:
        return
    path = run.directory / FILE
    known = cast("dict[str, dict[str, Any]]", read_json(path)) if path.exists() else {}
    record: dict[str, dict[str, Any]] = {}
    for field, name in names.items():
        sha256 = own_code.sha256_of(name)
        record[field] = {
            "name": name,
            "sha256": sha256,
            "earlier": _earlier(run, field, known.get(field), sha256, version),
        }
        _copy(run, name, sha256)
    atomic_write.write_json(path, record)


def _earlier(run: Run, field: str, known: Mapping[str, Any] | None, sha256: str, version: int) -> list[dict[str, Any]]:
    """Return the hashes that this code had before, each with the last step that used it; tell of a new change."""
    if known is None or known["sha256"] == sha256:
        return list(known["earlier"]) if known else []
    short = own_code.short(str(known["name"]))
    run.event("code_changed", field=field, name=known["name"], before=known["sha256"], now=sha256, step=version)
    run.warn(
        f"{field}: {short} has changed since step {version} (SHA-256 {known['sha256'][:12]}, now {sha256[:12]}); "
        "the run goes on with the new code, and code/ has both"
    )
    return [*known["earlier"], {"sha256": known["sha256"], "last_step": version}]


def _copy(run: Run, name: str, sha256: str) -> None:
    file = own_code.file_of(name)
    if name.startswith(own_code.OBJECT) or not sha256:
        return
    directory = run.directory / "code"
    atomic_write.make_directory(directory)
    target = directory / f"{file.stem}.{sha256[:12]}.py"
    if not target.exists():
        shutil.copyfile(file, target)
