"""trackio: the calls of wandb, with data on this machine."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.obs.trackers.tracker_process import TrackerTarget


class Trackio:
    def __init__(self, place: TrackerTarget) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(project=place.project, name=place.name, resume="allow")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
