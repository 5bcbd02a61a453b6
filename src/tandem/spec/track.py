"""`[track]`: trackers that are told every step's numbers, besides metrics.jsonl."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.spec.base import Spec


class TrackSpec(Spec):
    """A tracker that fails, or hangs, is warned of once; the run goes on at its own pace."""

    to: list[Literal["wandb", "trackio", "tensorboard", "mlflow"]] = Field(min_length=1)
    """Which ones; each must be installed. Credentials are theirs to find."""
    project: str = Field(default="tandem", min_length=1)
    """Under which name they file the run (mlflow: the experiment)."""
    url: str = ""
    """mlflow's tracking server. Left out: where mlflow itself looks."""
