import math
import time

import numpy as np
import pytest

from tandem.runs.verdict import judge


def test_every_task_solved_only_afterwards_is_improved_with_certainty():
    verdict = judge([0.0] * 40, [1.0] * 40, confidence=0.95, measure="accuracy")
    assert verdict.verdict == "improved"
    assert (verdict.before, verdict.after, verdict.difference, verdict.interval) == (0.0, 1.0, 1.0, (1.0, 1.0))
    assert (verdict.tasks, verdict.confidence) == (40, 0.95)


@pytest.mark.parametrize("measure", ["accuracy", "reward", "loss"])
@pytest.mark.parametrize(("tasks", "word"), [(4, "undecided"), (58, "undecided"), (60, "unchanged")])
def test_identical_scores_are_unchanged_where_one_changed_task_in_twenty_would_be_among_them(measure, tasks, word):
    # 0.95 ** 58 = 0.051 > 0.05 > 0.95 ** 59
    verdict = judge([0.0, 1.0] * (tasks // 2), [0.0, 1.0] * (tasks // 2), confidence=0.95, measure=measure)
    assert (verdict.verdict, verdict.interval) == (word, (0.0, 0.0))
    assert bool(verdict.why) == (word == "undecided")


@pytest.mark.parametrize(("each_way", "word"), [(5, "unchanged"), (40, "undecided")])
def test_an_interval_that_holds_0_is_unchanged_only_where_it_is_within_five_points(each_way, word):
    # 10 of 256 tasks that changed: +-1.96 * sqrt(10) / 256 = 2.4 points. 80 of them: 6.8 points.
    before = [0.0] * each_way + [1.0] * each_way + [0.0] * (256 - 2 * each_way)
    after = [1.0] * each_way + [0.0] * each_way + [0.0] * (256 - 2 * each_way)
    verdict = judge(before, after, confidence=0.95, measure="accuracy")
    assert (verdict.difference, verdict.margin, verdict.verdict) == (0.0, 0.05, word)
    assert ("wider than the ±5 points" in verdict.why) == (word == "undecided")


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_a_loss_or_a_reward_may_move_by_a_fifth_of_its_spread_whatever_its_scale(scale):
    rng = np.random.default_rng(0)
    before = scale * rng.normal(-19.0, 1.0, 400)
    small, large = before + scale * rng.normal(0.0, 0.5, 400), before + scale * rng.normal(0.0, 4.0, 400)
    for measure in ("reward", "loss"):
        assert judge(before.tolist(), small.tolist(), confidence=0.95, measure=measure).verdict == "unchanged"
        assert judge(before.tolist(), large.tolist(), confidence=0.95, measure=measure).verdict == "undecided"


def test_a_loss_that_falls_is_improved_and_one_that_rises_is_worse():
    high, low = [2.0 + 0.01 * i for i in range(30)], [1.0 + 0.02 * i for i in range(30)]
    assert judge(high, low, confidence=0.95, measure="loss").verdict == "improved"
    assert judge(low, high, confidence=0.95, measure="loss").verdict == "worse"
    assert judge(high, low, confidence=0.95, measure="reward").verdict == "worse"


def test_swapping_before_and_after_mirrors_the_interval():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.0, 1.0, 100), rng.normal(0.3, 1.0, 100)
    forward, back = (judge(x.tolist(), y.tolist(), confidence=0.9, measure="reward") for x, y in ((a, b), (b, a)))
    assert forward.interval == pytest.approx((-back.interval[1], -back.interval[0]))


def test_the_interval_agrees_with_the_normal_one_where_that_is_right():
    changes = np.random.default_rng(0).normal(0.1, 1.0, 400)
    verdict = judge([0.0] * 400, changes.tolist(), confidence=0.95, measure="reward")
    half = 1.96 * changes.std() / math.sqrt(400)
    assert verdict.interval == pytest.approx((changes.mean() - half, changes.mean() + half), abs=0.01)


def test_pairing_sees_a_small_gain_that_unpaired_noise_would_hide():
    difficulty = np.random.default_rng(1).normal(0.0, 10.0, 50)
    assert (
        judge(difficulty.tolist(), (difficulty + 0.1).tolist(), confidence=0.95, measure="reward").verdict == "improved"
    )


@pytest.mark.parametrize(
    ("changed", "expected"), [(1, "undecided"), (2, "undecided"), (5, "undecided"), (6, "improved")]
)
def test_five_changed_tasks_are_too_few_for_95_percent_and_six_are_enough(changed, expected):
    # All m in one direction: probability 2 ** (1 - m) by chance; 1/16 > 0.05 > 1/32.
    verdict = judge([0.0] * changed, [1.0] * changed, confidence=0.95, measure="accuracy")
    assert verdict.verdict == expected
    assert (verdict.interval[0] <= 0.0) == (expected == "undecided")
    assert ("too few for a verdict: at 95 % confidence it needs 6" in verdict.why) == (expected == "undecided")


def test_two_rows_whose_loss_fell_by_two_thirds_are_too_few_to_say_unchanged():
    verdict = judge([4.1, 4.06], [1.3, 1.286], confidence=0.95, measure="loss")
    assert verdict.verdict == "undecided"
    assert verdict.interval[0] == pytest.approx(-2.8, abs=0.03)


def test_the_95_percent_interval_covers_the_true_difference_about_95_percent_of_the_time():
    # Binomial with n = 1000, p = 0.95: mean 950, standard deviation 6.9. 925 and 970 lie 2.9 deviations out and more:
    # an interval of 90 % or of 98 % is caught.
    rng = np.random.default_rng(7)
    covered = 0
    for trial in range(1000):
        before, after = rng.random(60) < 0.3, rng.random(60) < 0.5
        low, high = judge(before.tolist(), after.tolist(), confidence=0.95, measure="accuracy", seed=trial).interval
        covered += low <= 0.2 <= high
    assert 925 <= covered <= 970


def test_the_interval_over_eight_rows_is_no_shorter_than_it_says():
    # The plain percentile bootstrap covers 88 to 90 % here; within 2.9 standard deviations of 95 % is 930 and more.
    rng = np.random.default_rng(3)
    covered = 0
    for trial in range(1000):
        changes = rng.normal(-1.0, 0.5, 8)
        low, high = judge([0.0] * 8, changes.tolist(), confidence=0.95, measure="loss", seed=trial).interval
        covered += low <= -1.0 <= high
    assert 930 <= covered <= 970


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    rng = np.random.default_rng(0)
    before, after = rng.random(64).tolist(), rng.random(64).tolist()
    first, again, other = (judge(before, after, confidence=0.95, measure="reward", seed=seed) for seed in (5, 5, 6))
    assert first == again != other


def test_a_verdict_over_512_tasks_takes_less_than_three_tenths_of_a_second():
    rng = np.random.default_rng(0)
    before, after = rng.random(512).tolist(), rng.random(512).tolist()
    start = time.process_time()
    judge(before, after, confidence=0.95, measure="reward")
    assert time.process_time() - start < 0.3


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [([], [], "same tasks twice"), ([1.0], [1.0, 0.0], "1 before, 2 after"), ([1.0], [math.nan], "finite")],
)
def test_scores_that_cannot_be_paired_are_refused(before, after, said):
    with pytest.raises(ValueError, match=said):
        judge(before, after, confidence=0.95, measure="reward")
