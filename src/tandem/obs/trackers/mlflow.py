"""MLflow, through its client: no global run that other code in this process could be writing to."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Mlflow:
    def __init__(self, project: str, name: str, url: str) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._metric, self._client = Metric, MlflowClient(tracking_uri=url or None)
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        self._id = self._client.create_run(experiment, run_name=name).info.run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(key, value, now_ms, step) for key, value in numbers.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)
