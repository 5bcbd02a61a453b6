"""Weights & Biases. A resumed run continues under the same id."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from tandem.obs.trackers.tracker_process import TrackerTarget


class Wandb:
    def __init__(self, place: TrackerTarget) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        run_id = hashlib.sha256(str(Path(place.directory).resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(dir=place.directory, project=place.project, name=place.name, id=run_id, resume="allow")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
