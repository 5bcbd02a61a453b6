"""The first bad step of a run: each illness at its step, and none of a run that is well."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from tandem.obs.bad_step import first_bad_step

Row = dict[str, Any]
STEPS = 80


def healthy(seed: int, learns: bool = True) -> list[Row]:
    """Noise as of a small run: rewards of few answers, gradients that vary tenfold, an entropy that falls."""
    rng = random.Random(seed)
    return [
        {
            "step": step, "stage": "rl", "loss/total": rng.gauss(0, 0.1), "grad/norm": rng.lognormvariate(0, 0.6),
            "reward/mean": min(1.0, max(0.0, (step / STEPS if learns else 0.3) + rng.gauss(0, 0.15))),
            "policy/entropy": 2.0 * (1 - step / STEPS * (0.97 if learns else 0.3)) + rng.random() * 0.01,
            "episode/truncated": rng.random() * 0.3,
        }
        for step in range(1, STEPS + 1)
    ]  # fmt: skip


@pytest.mark.parametrize("learns", [True, False])
def test_runs_that_are_well_have_none(learns: bool):
    assert [first_bad_step(healthy(seed, learns)) for seed in range(200)] == [None] * 200
    assert first_bad_step([]) is None
    assert first_bad_step(healthy(0)[:3]) is None


def from_on(step: int, **values: Any) -> Callable[[Row], None]:
    return lambda row: row.update(values) if row["step"] >= step else None


def at(step: int, **values: Any) -> Callable[[Row], None]:
    return lambda row: row.update(values) if row["step"] == step else None


def metric(**values: Any) -> dict[str, Any]:
    return {name.replace("__", "/"): value for name, value in values.items()}


@pytest.mark.parametrize(
    ("ill", "step", "named", "why"),
    [
        (at(41, **metric(loss__total=None)), 41, "loss/total", "no number"),
        (at(41, **metric(grad__norm=math.nan)), 41, "grad/norm", "no number"),
        (at(41, **metric(release__skipped=1.0)), 41, "release/skipped", "skipped"),
        (at(41, **metric(grad__norm=500.0)), 41, "grad/norm", "times that of the steps before"),
        (from_on(50, **metric(reward__mean=0.01)), 50, "reward/mean", "falls from"),
        (from_on(30, **metric(policy__entropy=0.001, reward__mean=0.05)), 30, "", "entropy"),
        (from_on(60, **metric(episode__truncated=0.9)), 60, "episode/truncated", "cut at the limit"),
    ],
)
def test_each_illness_is_named_at_its_step(ill: Callable[[Row], None], step: int, named: str, why: str):
    rows = healthy(1, learns=False)
    for row in rows:
        ill(row)
    bad = first_bad_step(rows)
    assert bad is not None
    assert (bad.step, named in bad.metric) == (step, True)
    assert why in bad.why or (named == "" and bad.metric == "reward/mean")


def test_the_earliest_counts_and_only_of_the_last_stage():
    rows = healthy(2)
    for row in rows:
        from_on(70, **metric(reward__mean=0.0))(row)
        at(60, **metric(grad__norm=900.0))(row)
    bad = first_bad_step(rows)
    assert bad is not None
    assert bad.step == 60
    before = [{"step": step, "stage": "warmup", "loss/total": None} for step in range(5)]
    assert first_bad_step([*before, *healthy(3)]) is None


def test_a_certain_policy_that_earns_more_is_well():
    rows = healthy(4)
    for row in rows:
        from_on(50, **metric(policy__entropy=0.0, reward__mean=1.0))(row)
    assert first_bad_step(rows) is None
