"""Read from a run's directory how it ended, and its final digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from tandem.errors import RunError
from tandem.io import atomic_write
from tandem.io.bounded_json import read_json
from tandem.io.jsonl import read_jsonl, salvage_jsonl
from tandem.io.sealed_directory import digest_of
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.failure_diagnosis import Failure
from tandem.spec.load import load_spec
from tandem.spec.run import RunSpec
from tandem.types import MEASURED


def spec_of(directory: Path) -> RunSpec:
    if not (directory / "spec.toml").exists():
        raise RunError(f"{directory}: is not a run (it has no spec.toml); `tandem train SPEC` starts one")
    return load_spec(directory / "spec.toml")


def asked_of(directory: Path, spec: RunSpec) -> Collection[str]:
    """Return the settings of a run's spec that its user wrote; all of them if its first process did not say."""
    rows = salvage_jsonl(directory / "events.jsonl").rows.values()
    return next((row["settings"] for row in rows if row.get("stage") == "asked" and "settings" in row), spec.settings())


def finished(directory: Path) -> Mapping[str, Any] | None:
    """Return the status of a run that succeeded; otherwise None."""
    try:
        status = read_json(directory / "status.json")
        if not isinstance(status, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{directory}: its status.json cannot be read: {error}; move it away, and `tandem resume {directory}` "
            "continues from the last checkpoint"
        ) from error
    told = cast("dict[str, Any]", status)
    return told if told.get("state") == "succeeded" else None


def digest_run(directory: str | Path) -> dict[str, str]:
    """Return SHA-256 hashes of the final weights (or adapters), the optimizer state, and the loss log without timings.
    They are equal for equal runs, even if one was killed and resumed."""
    directory = Path(directory)
    spec = spec_of(directory)
    if finished(directory) is None:
        raise RunError(
            f"{directory}: did not succeed, so it has no final weights; `tandem resume {directory}` continues it"
        )
    if not spec.checkpoint.every:
        raise RunError(f"{directory}: checkpoint.every = 0: its optimizer was never saved, so there is no digest")
    shelf = Checkpoints(directory)
    if not (versions := shelf.versions()):
        raise RunError(f"{directory}: its last checkpoint was removed, so there is no digest")
    last = shelf.read(versions[-1]).path
    return {
        "weights": digest_of(last / "weights.safetensors"),
        "optimizer": digest_of(last / "optimizer.safetensors"),
        "log": _log_digest(directory / "metrics.jsonl"),
    }


def _log_digest(metrics: Path) -> str:
    found = hashlib.sha256()
    for row in read_jsonl(metrics):
        kept = {key: value for key, value in row.items() if not key.startswith(MEASURED)}
        found.update((json.dumps(kept) + "\n").encode())
    return found.hexdigest()


def say_failed(directory: Path, status: Mapping[str, Any], failure: Failure, why: str) -> None:
    """Mark a run as failed if no process has it open and its status does not say how it ended. The caller holds the
    lease."""
    if status.get("state") in ("queued", "running"):
        told = {"state": "failed", "error": why, "failure": failure.row()}
        atomic_write.write_json(directory / "status.json", {**status, **told})
