"""`[track]`: trackers that receive every step's metrics, besides metrics.jsonl."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from tandem.spec.base import LocalPath, Spec
from tandem.spec.own import is_own

_KNOWN = ("wandb", "trackio", "tensorboard", "mlflow")


class TrackSpec(Spec):
    """Send metrics to trackers. If a tracker fails or hangs, the run warns once and goes on."""

    to: Annotated[list[str], LocalPath("file:Class")] = Field(min_length=1)
    """wandb, trackio, tensorboard, mlflow: each must be installed, and finds its own credentials; or a class of your
    own, as `file.py:Class`."""
    project: str = Field(default="tandem", min_length=1)
    """Project of the run in the tracker (mlflow: experiment)."""
    url: str = ""
    """URL of mlflow's tracking server; empty: mlflow's own default."""

    @field_validator("to")
    @classmethod
    def _are_known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in _KNOWN and not is_own(name):
                raise ValueError(f"'{name}' is no tracker; write {', '.join(_KNOWN)}, or path/to/file.py:Class")
        return names
