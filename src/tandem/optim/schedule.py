"""The learning rate as a share of its peak, by step of the stage."""

from __future__ import annotations

import math

from tandem.spec.optim import CosineSchedule, LinearSchedule, ScheduleSpec


def lr_share(spec: ScheduleSpec, step: int, steps: int) -> float:
    """Return the share at `step`, from 0 on: the peak right after the warm-up, `final` at the last step."""
    if step < spec.warmup_steps:
        return (step + 1) / (spec.warmup_steps + 1)
    done = (step - spec.warmup_steps) / max(1, steps - 1 - spec.warmup_steps)
    if isinstance(spec, CosineSchedule):
        return spec.final + (1 - spec.final) * (1 + math.cos(math.pi * done)) / 2
    if isinstance(spec, LinearSchedule):
        return 1 - (1 - spec.final) * done
    return 1.0
