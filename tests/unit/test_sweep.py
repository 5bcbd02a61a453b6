"""What several seeds say together."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import SpecError
from tandem.runs.sweep import SeedResult, Sweep, conclusion, summarise, table
from tandem.runs.verdict import t_quantile
from tandem.spec.load import parse_seeds

HERE = Path("sweep")


def swept(*ends: tuple[float, float], metric: str = "accuracy", tasks: int = 256, failed: int = 0) -> Sweep:
    seeds = [
        SeedResult(seed, f"seed-{seed}", "succeeded", before, after, (after - before, after - before), "improved", 1.0)
        for seed, (before, after) in enumerate(ends)
    ]
    seeds += [
        SeedResult(90 + n, f"seed-{90 + n}", "failed", 0.9, 0.1, error="Starved:\x1b a|b\nc") for n in range(failed)
    ]
    status: dict[str, Any] = {"state": "succeeded", "eval": {"metric": metric, "tasks": tasks, "margin": 0.05}}
    return summarise(HERE, seeds, [status] * len(ends), 0.95)


@pytest.mark.parametrize(
    ("probability", "degrees", "tabled"),
    [
        (0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 4, 2.77645), (0.975, 9, 2.26216), (0.975, 30, 2.04227),
        (0.995, 2, 9.92484), (0.95, 5, 2.01505), (0.975, 1000, 1.96234),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(probability: float, degrees: int, tabled: float):
    assert t_quantile(probability, degrees) == pytest.approx(tabled, rel=1e-5)


def test_mean_deviation_and_interval_of_three_seeds_by_hand():
    found = swept((0.2, 0.5), (0.3, 0.7), (0.1, 0.6))
    assert found.difference is not None
    assert found.interval is not None
    assert found.difference.mean == pytest.approx(0.4)
    assert found.difference.std == pytest.approx(0.1)  # of 0.3, 0.4, 0.5, with n - 1
    assert found.interval == pytest.approx((0.4 - 4.30265 * 0.1 / 3**0.5, 0.4 + 4.30265 * 0.1 / 3**0.5), rel=1e-5)
    assert found.before is not None
    assert (found.before.mean, found.before.std) == pytest.approx((0.2, 0.1))
    assert found.verdict == "improved"


def test_the_interval_holds_the_true_mean_as_often_as_it_says():
    """400 sweeps of 3 seeds: within four standard errors of 95 %."""
    rng = random.Random(0)
    hits = 0
    for _ in range(400):
        found = swept(*((0.0, rng.gauss(0.1, 0.05)) for _ in range(3)))
        assert found.interval is not None
        hits += found.interval[0] <= 0.1 <= found.interval[1]
    assert abs(hits / 400 - 0.95) < 4 * (0.95 * 0.05 / 400) ** 0.5


@pytest.mark.parametrize(
    ("changes", "metric", "verdict"),
    [
        ((0.3, 0.31, 0.32), "accuracy", "improved"),
        ((-0.3, -0.31, -0.32), "accuracy", "worse"),
        ((-0.3, -0.31, -0.32), "loss", "improved"),
        ((0.3, 0.31, 0.32), "loss", "worse"),
        ((-0.3, -0.31, -0.32), "reward", "worse"),
        ((0.3, -0.1, 0.1), "accuracy", "undecided"),
        ((0.001, -0.001, 0.0), "loss", "unchanged"),
        ((0.3, 0.1), "accuracy", "undecided"),  # two seeds: 12.7 standard errors on either side
        ((0.3,), "accuracy", "undecided"),
        ((), "accuracy", "undecided"),
    ],
)
def test_the_verdict_follows_the_interval(changes: tuple[float, ...], metric: str, verdict: str):
    assert swept(*((0.5, 0.5 + change) for change in changes), metric=metric).verdict == verdict


@pytest.mark.parametrize(("tasks", "verdict"), [(2, "undecided"), (40, "improved"), (256, "improved")])
def test_seeds_that_agree_about_two_tasks_are_undecided_all_the_same(tasks: int, verdict: str):
    assert swept((0.5, 0.8), (0.5, 0.81), (0.5, 0.82), metric="reward", tasks=tasks).verdict == verdict


def test_two_seeds_that_moved_by_the_same_one_task_are_no_proof():
    """Their deviation is 0, and so would the interval be."""
    assert swept((0.5, 0.5 + 1 / 256), (0.4, 0.4 + 1 / 256)).verdict == "unchanged"
    assert swept((0.5, 0.9), (0.4, 0.8)).verdict == "improved"


def test_failed_seeds_are_counted_and_have_no_part_in_the_numbers():
    found = swept((0.2, 0.5), (0.3, 0.7), failed=2)
    assert found.failed == 2
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(statistics.fmean([0.3, 0.4]))
    assert conclusion(found).endswith(" 2 of 4 seeds failed.")


def test_a_sweep_of_failures_is_undecided():
    assert conclusion(swept(failed=2)) == "Undecided: 0 judged seeds; an interval needs two. 2 of 2 seeds failed."


def test_the_table_has_a_row_a_seed_and_what_they_say_together():
    assert table(swept((0.2, 0.5), (0.3, 0.7), failed=1)).splitlines() == [
        "| seed | accuracy before | after | after - before | of its tasks | verdict |",
        "|---|---|---|---|---|---|",
        "| 0 | 0.200 | 0.500 | +0.300 | [+0.300, +0.300] | improved |",
        "| 1 | 0.300 | 0.700 | +0.400 | [+0.400, +0.400] | improved |",
        "| 90 | 0.900 | 0.100 | -0.800 |  | failed: Starved: a/b c |",
        "| mean | 0.250 | 0.600 | +0.350 | | |",
        "| std | 0.071 | 0.141 | 0.071 | | |",
        "",
        "Undecided: held-out accuracy +0.350 on average, 95% t-interval [-0.285, +0.985] over 2 seeds: "
        "the interval contains 0, and is wider than the ±5 points of `unchanged`. 1 of 3 seeds failed.",
    ]


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1;2", "0-3"])
def test_seeds_that_are_no_numbers_are_refused(text: str):
    assert parse_seeds("0,1, 2") == [0, 1, 2]
    with pytest.raises(SpecError, match="as in --seeds 0,1,2"):
        parse_seeds(text)
