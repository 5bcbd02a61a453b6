"""Whether a canary fails more often than the others, by the counts of their answers."""

from __future__ import annotations

import math
import random

import pytest

from tandem.control.counts import Counts, mean, why_worse, wilson


def test_a_canary_that_fails_is_known_soon_and_one_that_does_not_is_left_alone():
    assert why_worse(Counts(2, 2), Counts(38, 0)) == ""
    assert why_worse(Counts(3, 3), Counts(57, 0)) == (
        "3 of its 3 answers failed, and 0 of 57 of the others: more than chance explains"
    )
    assert why_worse(Counts(500, 50), Counts(9500, 100))
    assert why_worse(Counts(500, 0), Counts(9500, 9500)) == ""
    assert why_worse(Counts(5, 5), Counts(95, 95)) == ""
    assert why_worse(Counts(1000, 1000), Counts()) == ""


def test_the_chance_is_fishers():
    for canary, others in (((20, 4), (380, 7)), ((50, 5), (950, 12)), ((300, 9), (700, 3)), ((7, 3), (60, 2))):
        (drawn, hits), (rest, other_hits) = canary, others
        marked = hits + other_hits
        ways = [math.comb(marked, k) * math.comb(drawn + rest - marked, drawn - k) for k in range(hits, marked + 1)]
        sure = sum(ways) / math.comb(drawn + rest, drawn) <= 1e-4
        assert bool(why_worse(Counts(*canary), Counts(*others))) is sure, (canary, others)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_equal_revisions_are_rarely_told_apart_however_often_one_looks(share: float):
    chance, rolled_back, trials = random.Random(7), 0, 40
    for _ in range(trials):
        canary, others = Counts(), Counts()
        for number in range(4000):
            (canary if chance.random() < share else others).add(0.1, failed=chance.random() < 0.02)
            if number % 40 == 0 and why_worse(canary, others):
                rolled_back += 1
                break
    assert rolled_back <= 2


def test_intervals_are_those_of_the_books():
    low, high = wilson(3, 200)
    assert (round(low, 4), round(high, 4)) == (0.0051, 0.0432)
    assert wilson(0, 0) == (0.0, 1.0)
    middle, reach = mean(6.0, 14.0, 3)
    assert middle == 2.0
    assert reach == pytest.approx(1.96 / math.sqrt(3))
    assert mean(1.0, 1.0, 1) == (1.0, math.inf)


def test_failed_answers_have_no_seconds():
    counts = Counts()
    counts.add(2.0, failed=False)
    counts.add(9.0, failed=True)
    assert counts.plus({"requests": 1, "seconds": 1.0}) == {"requests": 3, "errors": 1, "seconds": 3.0, "squares": 4.0}
