from __future__ import annotations

import math

import pytest

from tandem.optim.schedule import lr_share
from tandem.spec.optim import ConstantSchedule, CosineSchedule, LinearSchedule, ScheduleSpec


def shares(spec: ScheduleSpec, steps: int) -> list[float]:
    return [lr_share(spec, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (ConstantSchedule(), [1, 1, 1, 1, 1]),
        (ConstantSchedule(warmup_steps=3), [0.25, 0.5, 0.75, 1, 1]),
        (LinearSchedule(final=0.2), [1, 0.8, 0.6, 0.4, 0.2]),
        (LinearSchedule(final=0.0, warmup_steps=1), [0.5, 1, 2 / 3, 1 / 3, 0]),
        (CosineSchedule(final=0.0), [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        (CosineSchedule(final=0.1, warmup_steps=2), [1 / 3, 2 / 3, 1, 0.55, 0.1]),
    ],
    ids=lambda value: value.kind if hasattr(value, "kind") else "",
)
def test_a_schedule_has_these_values(spec: ScheduleSpec, expected: list[float]) -> None:
    assert shares(spec, len(expected)) == pytest.approx(expected)


@pytest.mark.parametrize("kind", [ConstantSchedule, LinearSchedule, CosineSchedule])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 6, 50])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_the_learning_rate_is_never_zero_by_accident_nor_above_its_peak(
    kind: type, warmup_steps: int, steps: int
) -> None:
    for share in shares(kind(warmup_steps=warmup_steps), steps):
        assert 0 < share <= 1
