"""`[liveness]`: after how many seconds without progress a run counts as stalled."""

from __future__ import annotations

from pydantic import Field

from tandem.spec.base import Spec


class LivenessSpec(Spec):
    """Limits for the run's progress counter. Only the working thread advances it; the observer measures time on its own
    clock."""

    setup_s: float = Field(default=3000.0, gt=0)
    """Most seconds without progress while loading, starting engines, compiling, evaluating, until a stage's first step.
    """
    step_s: float = Field(default=1500.0, gt=0)
    """Most seconds from one micro-batch or step to the next."""
