"""`[liveness]`: how long nothing may move before a run counts as stalled."""

from __future__ import annotations

from pydantic import Field

from tandem.spec.base import Spec


class LivenessSpec(Spec):
    """When a run counts as stalled: measured on the observer's clock, by a counter that only the working thread
    moves."""

    setup_s: float = Field(default=3000.0, gt=0)
    """The longest without a sign while loading, starting engines, compiling, evaluating, up to a stage's first step."""
    step_s: float = Field(default=1500.0, gt=0)
    """The longest from one micro-batch or step to the next."""
