"""`[checkpoint]`: what is kept, so that a run can be taken up again."""

from __future__ import annotations

from pydantic import Field

from tandem.spec.base import Spec


class CheckpointSpec(Spec):
    """A run that was killed goes on from its last checkpoint: `tandem resume DIR`."""

    every: int = Field(default=10, ge=0)
    """Save after this many steps, and at the end of each stage. 0 saves nothing; a resumed run then starts over."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest stay. With 2 or more, a damaged one costs steps and not the run."""
    keep_every: int = Field(default=0, ge=0)
    """Those of steps that this divides stay for good; 0: none."""
    keep_best: bool = True
    """The one with the best evaluation in the run (eval.every) stays, too, and is saved for that."""
    max_failures: int = Field(default=5, ge=1)
    """So many saves in a row that fail (a full disk, for one) end the run; until then it trains on and tries again."""
    grace_s: float = Field(default=30.0, gt=0)
    """Seconds that a step under way has, after SIGTERM or Ctrl-C, to end and be saved."""
