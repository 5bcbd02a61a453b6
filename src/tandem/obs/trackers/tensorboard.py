"""TensorBoard: event files in the run's tensorboard/, written by TensorBoard's own writer, which needs no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tandem.obs.trackers.tracker_process import TrackerTarget


class Tensorboard:
    def __init__(self, place: TrackerTarget) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(Path(place.directory) / "tensorboard"))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()
