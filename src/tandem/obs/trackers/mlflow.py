"""MLflow, through its client, without its global run, to which other code could write."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tandem.obs.trackers.tracker_process import TrackerTarget


class Mlflow:
    def __init__(self, place: TrackerTarget) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._metric, self._client = Metric, MlflowClient(tracking_uri=place.url or None)
        found = self._client.get_experiment_by_name(place.project)
        experiment = found.experiment_id if found else self._client.create_experiment(place.project)
        self._id = self._client.create_run(experiment, run_name=place.name).info.run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(key, value, now_ms, step) for key, value in numbers.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)
