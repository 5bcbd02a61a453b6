"""The reservoir is a fair choice, the same whatever order it is made in."""

from __future__ import annotations

import random
from collections import Counter

from tandem.online.sample_replay import Reservoir, content_key


def filled(count: int, capacity: int, *, seed: int = 0, order: int | None = None, **options: float) -> Reservoir[int]:
    found = Reservoir[int](capacity, seed=seed, **options)
    items = list(range(count))
    if order is not None:
        random.Random(order).shuffle(items)
    for item in items:
        found.add(content_key({"n": item}), f"source-{item % 3}", item)
    return found


def content(reservoir: Reservoir[int]) -> set[int]:
    return set(reservoir.draw(10**6, step=0))


def test_the_choice_does_not_depend_on_the_order():
    chosen = [content(filled(500, 50, per_source=0.4, order=order)) for order in (None, 1, 2)]
    assert chosen[0] == chosen[1] == chosen[2]
    assert len(chosen[0]) == 50
    assert content(filled(500, 50, seed=1)) != content(filled(500, 50))


def test_every_sample_is_as_likely_as_any_other():
    """200 samples, 20 kept, over 500 seeds: each 50 times, give or take 4.5 standard deviations (6.7)."""
    kept = Counter(item for seed in range(500) for item in content(filled(200, 20, seed=seed)))
    assert len(kept) == 200
    assert max(abs(kept[item] - 50) for item in range(200)) < 4.5 * 6.7


def test_one_source_cannot_fill_it():
    reservoir = Reservoir[str](40, per_source=0.25)
    for item in range(1000):
        reservoir.add(content_key(item), "loud", "loud")
    assert len(reservoir) == 10
    for item in range(1000, 1006):
        reservoir.add(content_key(item), "quiet", "quiet")
    assert Counter(reservoir.draw(99, step=0)) == {"loud": 10, "quiet": 6}


def test_the_same_content_counts_once():
    reservoir = Reservoir[int](10)
    first = content_key({"messages": [{"role": "user", "content": "hé"}], "lr": 1e-4})
    assert first == content_key({"lr": 1e-4, "messages": [{"content": "hé", "role": "user"}]})
    assert first != content_key({"messages": [{"role": "user", "content": "he"}], "lr": 1e-4})
    assert reservoir.add(first, "a", 1)
    assert not reservoir.add(first, "b", 1)
    assert len(reservoir) == 1


def test_draws_are_the_same_for_a_step_and_leave_out_what_is_fresh():
    reservoir = filled(30, 30)
    assert reservoir.draw(5, step=3) == filled(30, 30, order=9).draw(5, step=3)
    assert reservoir.draw(5, step=3) != reservoir.draw(5, step=4)
    fresh = {content_key({"n": item}) for item in range(25)}
    assert sorted(reservoir.draw(99, step=0, without=fresh)) == [25, 26, 27, 28, 29]
    assert len(set(reservoir.draw(20, step=1))) == 20
    assert Reservoir[int](4).draw(3, step=0) == []
