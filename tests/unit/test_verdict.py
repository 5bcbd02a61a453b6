import math
import time

import numpy as np
import pytest

from tandem.runs.verdict import judge


def test_every_task_solved_only_afterwards_is_improved_with_certainty():
    verdict = judge([0.0] * 40, [1.0] * 40, confidence=0.95)
    assert verdict.verdict == "improved"
    assert (verdict.before, verdict.after, verdict.difference, verdict.interval) == (0.0, 1.0, 1.0, (1.0, 1.0))
    assert (verdict.tasks, verdict.confidence) == (40, 0.95)


def test_identical_scores_are_unchanged_with_an_empty_interval():
    verdict = judge([0.0, 1.0] * 20, [0.0, 1.0] * 20, confidence=0.95)
    assert (verdict.verdict, verdict.interval) == ("unchanged", (0.0, 0.0))


def test_a_loss_that_falls_is_improved_and_one_that_rises_is_worse():
    high, low = [2.0 + 0.01 * i for i in range(30)], [1.0 + 0.02 * i for i in range(30)]
    assert judge(high, low, confidence=0.95, higher_is_better=False).verdict == "improved"
    assert judge(low, high, confidence=0.95, higher_is_better=False).verdict == "worse"
    assert judge(high, low, confidence=0.95).verdict == "worse"


def test_swapping_before_and_after_mirrors_the_interval():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.0, 1.0, 100), rng.normal(0.3, 1.0, 100)
    forward, back = judge(a.tolist(), b.tolist(), confidence=0.9), judge(b.tolist(), a.tolist(), confidence=0.9)
    assert forward.interval == pytest.approx((-back.interval[1], -back.interval[0]))


def test_the_interval_agrees_with_the_normal_one_where_that_is_right():
    changes = np.random.default_rng(0).normal(0.1, 1.0, 400)
    verdict = judge([0.0] * 400, changes.tolist(), confidence=0.95)
    half = 1.96 * changes.std() / math.sqrt(400)
    assert verdict.interval == pytest.approx((changes.mean() - half, changes.mean() + half), abs=0.01)


def test_pairing_sees_a_small_gain_that_unpaired_noise_would_hide():
    difficulty = np.random.default_rng(1).normal(0.0, 10.0, 50)
    assert judge(difficulty.tolist(), (difficulty + 0.1).tolist(), confidence=0.95).verdict == "improved"


@pytest.mark.parametrize(("changed", "expected"), [(5, "unchanged"), (6, "improved")])
def test_five_changed_tasks_are_too_few_for_95_percent_and_six_are_enough(changed, expected):
    # All m in one direction: probability 2 ** (1 - m) by chance; 1/16 > 0.05 > 1/32.
    verdict = judge([0.0] * changed, [1.0] * changed, confidence=0.95)
    assert verdict.verdict == expected
    assert (verdict.interval[0] <= 0.0) == (expected == "unchanged")


def test_the_95_percent_interval_covers_the_true_difference_about_95_percent_of_the_time():
    # Binomial with n = 1000, p = 0.95: mean 950, standard deviation 6.9; the percentile bootstrap itself is about 1 %
    # short at 60 tasks. 925 and 970 lie 2.9 deviations out and more; an interval of 90 % or of 98 % is caught.
    rng = np.random.default_rng(7)
    covered = 0
    for trial in range(1000):
        before, after = rng.random(60) < 0.3, rng.random(60) < 0.5
        low, high = judge(before.tolist(), after.tolist(), confidence=0.95, seed=trial).interval
        covered += low <= 0.2 <= high
    assert 925 <= covered <= 970


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    rng = np.random.default_rng(0)
    before, after = rng.random(64).tolist(), rng.random(64).tolist()
    assert judge(before, after, confidence=0.95, seed=5) == judge(before, after, confidence=0.95, seed=5)
    assert judge(before, after, confidence=0.95, seed=5) != judge(before, after, confidence=0.95, seed=6)


def test_a_verdict_over_512_tasks_takes_less_than_three_tenths_of_a_second():
    rng = np.random.default_rng(0)
    before, after = rng.random(512).tolist(), rng.random(512).tolist()
    start = time.process_time()
    judge(before, after, confidence=0.95)
    assert time.process_time() - start < 0.3


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [([], [], "same tasks twice"), ([1.0], [1.0, 0.0], "1 before, 2 after"), ([1.0], [math.nan], "finite")],
)
def test_scores_that_cannot_be_paired_are_refused(before, after, said):
    with pytest.raises(ValueError, match=said):
        judge(before, after, confidence=0.95)
