"""`[checkpoint]`: when a run saves its state, and which checkpoints it keeps."""

from __future__ import annotations

from pydantic import Field

from tandem.spec.base import Spec


class CheckpointSpec(Spec):
    """Save the run's state, so that `tandem resume DIR` continues a killed run from its last checkpoint."""

    every: int = Field(default=10, ge=0)
    """Steps between two checkpoints; one is also saved at the end of each stage. 0: save none, so that a resumed run
    starts from the beginning."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest checkpoints to keep. With 2 or more, a damaged one costs steps and not the run."""
    keep_every: int = Field(default=0, ge=0)
    """Keep the checkpoint of every step that is a multiple of this; 0: none."""
    keep_best: bool = True
    """Also save and keep the checkpoint with the best evaluation during the run (eval.every)."""
    max_failures: int = Field(default=5, ge=1)
    """The run ends after this many failed saves in a row (a full disk, for example); until then it tries again."""
    grace_s: float = Field(default=30.0, gt=0)
    """Seconds after SIGTERM or Ctrl-C for the current step to end and be saved."""
