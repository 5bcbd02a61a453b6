"""The step from which on a run looks ill: where one begins to read its answers and its log.

Each rule compares a step with those before it in the same stage. A healthy run has none: rules ask for what stays, or
for much more than noise.
"""

from __future__ import annotations

import statistics
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tandem.obs.run_history import Row, number

_FIRST = 5
"""Steps from which a run's own measure is taken."""
_LASTING = 10
"""A step counts if so many steps stay like it."""
_BEFORE, _SPIKE = 20, 30.0
"""A gradient is compared with the median of so many steps, and so much larger is ill."""
_COLLAPSED = 0.1


@dataclass(frozen=True, slots=True)
class BadStep:
    step: int
    metric: str
    why: str


def first_bad_step(rows: Sequence[Row]) -> BadStep | None:
    """Return the earliest step of the run's last stage that a rule names; None for a run that looks well."""
    last = rows[-1].get("stage") if rows else None
    stage = [row for row in rows if row.get("stage") == last]
    found = [bad for rule in _RULES if (bad := rule(stage)) is not None]
    return min(found, key=lambda bad: bad.step, default=None)


def _not_finite(rows: Sequence[Row]) -> BadStep | None:
    for row in rows:
        for metric, name in (("loss/total", "the loss"), ("grad/norm", "the gradient's norm")):
            if metric in row and number(row[metric]) is None:
                return BadStep(int(row["step"]), metric, f"{name} is no number")
        if number(row.get("release/skipped")):
            return BadStep(int(row["step"]), "release/skipped", "its update was skipped: the gradient is no number")
    return None


def _spike(rows: Sequence[Row]) -> BadStep | None:
    steps = [*_values(rows, "grad/norm")]
    before = sorted(value for _, value in steps[:_BEFORE])
    for at in range(_BEFORE, len(steps)):
        step, value = steps[at]
        usual = before[_BEFORE // 2]
        if usual > 0 and value > _SPIKE * usual:
            times = f"the gradient's norm is {value / usual:.0f} times that of the steps before"
            return BadStep(step, "grad/norm", times)
        before.remove(steps[at - _BEFORE][1])
        insort(before, value)
    return None


def _reward_lost(rows: Sequence[Row]) -> BadStep | None:
    """Half of what ten steps once earned is gone, for ten steps and to the end."""
    steps = [*_values(rows, "reward/mean")]
    best, sums = 0.0, [0.0, *accumulate(value for _, value in steps)]
    most_after = [*accumulate((value for _, value in reversed(steps)), max)][::-1]
    for at in range(_LASTING, len(steps) - _LASTING + 1):
        best = max(best, (sums[at] - sums[at - _LASTING]) / _LASTING)
        if most_after[at] < best / 2:
            after = statistics.fmean(value for _, value in steps[at:])
            why = f"the reward falls from {best:.3g} to {after:.3g} and stays low"
            return BadStep(steps[at][0], "reward/mean", why)
    return None


def _no_choice_left(rows: Sequence[Row]) -> BadStep | None:
    """The policy is as good as certain of each token, and earns no more than at first."""
    steps = [*_values(rows, "policy/entropy")]
    if len(steps) < _FIRST + _LASTING:
        return None
    first = statistics.fmean(value for _, value in steps[:_FIRST])
    bad = _lasting(steps, lambda value: value < _COLLAPSED * first)
    if bad is None or first <= 0:
        return None
    rewards = [*_values(rows, "reward/mean")]
    before = [value for step, value in rewards if step < bad]
    after = [value for step, value in rewards if step >= bad]
    if not before or not after or statistics.fmean(after) > statistics.fmean(before):
        return None
    return BadStep(bad, "policy/entropy", "the entropy has fallen to less than a tenth, and the reward has not risen")


def _cut_off(rows: Sequence[Row]) -> BadStep | None:
    """Most answers are cut at the limit, and at first they were not."""
    steps = [*_values(rows, "episode/truncated")]
    if len(steps) < _FIRST + _LASTING or statistics.fmean(value for _, value in steps[:_FIRST]) > 0.25:
        return None
    bad = _lasting(steps, lambda value: value > 0.5)
    return (
        None if bad is None else BadStep(bad, "episode/truncated", "more than half of the answers are cut at the limit")
    )


def _lasting(steps: Sequence[tuple[int, float]], ill: Callable[[float], bool]) -> int | None:
    """Return the first step from which on every step is ill, if they are enough."""
    count = 0
    for _, value in reversed(steps):
        if not ill(value):
            break
        count += 1
    return steps[-count][0] if count >= _LASTING else None


def _values(rows: Sequence[Row], metric: str) -> Iterator[tuple[int, float]]:
    for row in rows:
        if (value := number(row.get(metric))) is not None:
            yield int(row["step"]), value


_RULES = (_not_finite, _spike, _reward_lost, _no_choice_left, _cut_off)
