"""A run's checkpoints: `checkpoints/step-N`, each sealed. Damaged ones are set aside by name, never deleted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointDamaged, CheckpointError
from tandem.io import sealed_directory
from tandem.io.jsonl import salvage_jsonl

_STATE = "state.json"
_FORMAT = 1  # of state.json
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint that was verified."""

    path: Path
    version: int
    state: Mapping[str, Any]

    @property
    def stage(self) -> str:
        return self.state["stage"]


class Checkpoints:
    def __init__(self, run_dir: Path, *, permit: Callable[[], None] = lambda: None) -> None:
        """`permit` raises if this process may no longer write."""
        self.directory, self._permit = run_dir / "checkpoints", permit
        self.set_aside: list[str] = []
        """One text per damaged checkpoint: its step, its new name and the reason."""

    def path(self, version: int) -> Path:
        return self.directory / f"step-{version}"

    def versions(self) -> list[int]:
        """Return the saved versions, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(match[1]) for path in self.directory.iterdir() if (match := _STEP.fullmatch(path.name)))

    def newest(self) -> VerifiedCheckpoint | None:
        """Return the newest undamaged checkpoint, and rename the damaged ones after it. Return None if none was ever
        saved. CheckpointDamaged if all are damaged: the run does not start over, because one may be repaired."""
        for version in reversed(self.versions()):
            try:
                return self.read(version)
            except CheckpointDamaged as error:
                aside = sealed_directory.quarantine(self.path(version))
                self.set_aside.append(f"checkpoint of step {version} is damaged, now called {aside.name}: {error}")
        damaged = self.set_aside or sorted(path.name for path in self.directory.glob("damaged-step-*"))
        told = salvage_jsonl(self.directory.parent / "events.jsonl").rows.values()
        if damaged or any(row.get("stage") == "checkpoint" for row in told):
            raise CheckpointDamaged(
                f"{self.directory}: no undamaged checkpoint is left ({'; '.join(damaged) or 'they were removed'}); "
                "restore a copy, or repair one and remove `damaged-` from its name, or train in a new directory"
            )
        return None

    def read(self, version: int) -> VerifiedCheckpoint:
        """Verify and read a checkpoint. CheckpointDamaged names a bad file; CheckpointError: it has another format."""
        path = self.path(version)
        sealed_directory.verify(path)
        state: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))
        if (found := state.get("format")) != _FORMAT:
            raise CheckpointError(
                f"{path / _STATE}: has format {'none' if found is None else found}, and this Tandem reads format "
                f"{_FORMAT}; resume with the Tandem that wrote it"
            )
        if kept := state.get("reference"):
            sealed_directory.verify(self.directory / kept)  # resuming needs it
        return VerifiedCheckpoint(path, version, state)

    def write(self, version: int, fill: Callable[[Path], None], state: Mapping[str, Any]) -> None:
        """Write a checkpoint; block until it is on the disk."""
        with sealed_directory.sealed(self.path(version), permit=self._permit) as directory:
            fill(directory)
            text = json.dumps({"format": _FORMAT, **state}, default=_plain)
            (directory / _STATE).write_text(text, encoding="utf-8")

    def keep_aside(self, name: str, fill: Callable[[Path], None]) -> str:
        """Write a directory that several checkpoints name but do not contain; return its name."""
        if (self.directory / name).exists():  # from a process that ended before any checkpoint named it
            sealed_directory.remove(self.directory / name)
        with sealed_directory.sealed(self.directory / name, permit=self._permit) as directory:
            fill(directory)
        return name

    def prune(self, keep: Collection[int]) -> None:
        for version in self.versions():
            if version not in keep:
                self._permit()
                sealed_directory.remove(self.path(version))

    def sweep(self) -> None:
        sealed_directory.sweep(self.directory)


def _plain(value: Any) -> Any:
    """Return a trajectory, or another dataclass of plain values, as JSON."""
    from dataclasses import asdict

    return asdict(value)
