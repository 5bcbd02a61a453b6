"""`[track]`: trackers that receive every step's metrics, besides metrics.jsonl."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.spec.base import Spec


class TrackSpec(Spec):
    """Send metrics to trackers. If a tracker fails or hangs, the run warns once and goes on."""

    to: list[Literal["wandb", "trackio", "tensorboard", "mlflow"]] = Field(min_length=1)
    """Names of the trackers. Each must be installed, and finds its own credentials."""
    project: str = Field(default="tandem", min_length=1)
    """Project of the run in the tracker (mlflow: experiment)."""
    url: str = ""
    """URL of mlflow's tracking server; empty: mlflow's own default."""
