"""Gates pass by numbers and close without them; the watch tells a fall from noise."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from tandem.online import gates
from tandem.online.regression_watch import RegressionWatch
from tandem.online.weight_deltas import WeightChange
from tandem.spec.online_gates import WatchSpec

NAN, INF = float("nan"), float("inf")


def test_held_out_loss_may_rise_by_the_limit_and_no_more():
    passed = gates.held_out([1.0, 2.0], [1.04, 2.04], max_rise=0.05)
    failed = gates.held_out([1.0, 2.0], [1.0, 2.2], max_rise=0.05)
    assert (passed.passed, failed.passed) == (True, False)
    assert failed.value == pytest.approx(0.1)
    assert failed.numbers["worst"] == pytest.approx(0.2)
    assert failed.numbers["stderr"] == pytest.approx(0.1)
    assert failed.text == (
        "the loss of 2 held-out conversations went from 1.5000 to 1.6000 nats a token, +0.1000, and not within the "
        "limit of 0.05"
    )
    assert gates.held_out([2.0], [1.0], max_rise=0.0).passed
    assert gates.held_out([], [], max_rise=0.0).passed


def test_kl_from_samples_is_the_kl_in_closed_form_and_never_below_zero():
    torch.manual_seed(0)
    reference_V, candidate_V = (torch.randn(12).log_softmax(-1) for _ in range(2))
    exact = (reference_V.exp() * (reference_V - candidate_V)).sum().item()
    drawn = torch.multinomial(reference_V.exp(), 40_000, replacement=True).view(400, 100)
    pairs = [(reference_V[row].tolist(), candidate_V[row].tolist()) for row in drawn]
    found = gates.kl(pairs, limit=10.0)
    assert found.value == pytest.approx(exact, rel=0.03)
    assert found.numbers["stderr"] < 0.02
    for gap in (0.5, -0.5):
        assert gates.kl([([-1.0], [-1.0 + gap])], limit=10.0).value == pytest.approx(math.exp(gap) - 1 - gap)
    same = gates.kl([(reference_V.tolist(), reference_V.tolist())], limit=1e-9)
    assert (same.passed, same.value) == (True, 0.0)


def test_a_gate_that_sees_no_number_is_closed():
    verdicts = [
        gates.held_out([1.0], [NAN], max_rise=9.0),
        gates.held_out([NAN], [1.0], max_rise=9.0),
        gates.held_out([1.0], [INF], max_rise=9.0),
        gates.held_out([1.0, 2.0, 3.0], [INF, -INF, 3.0], max_rise=9.0),
        gates.kl([([-1.0, -1.0, -1.0], [-INF, -1.0, INF])], limit=9.0),
        gates.kl([([-1.0], [NAN])], limit=9.0),
        gates.kl([([-1.0], [-INF])], limit=9.0),
        gates.canary("c", expected_ids=[1], answer_ids=None, before=[-1.0], after=[NAN], max_drop=9.0),
        gates.update_norm(WeightChange(NAN, NAN, 1, 2), max_relative=9.0),
        gates.finite(WeightChange(1.0, 1.0, 1, 2), [1.0, NAN]),
        gates.finite(WeightChange(1.0, 1.0, 1, 2, ["lm_head.weight"]), [1.0]),
    ]
    assert not any(each.passed for each in verdicts)
    for each in verdicts:
        assert json.loads(json.dumps(each.row(), allow_nan=False))["gate"] == each.gate
    assert "'lm_head.weight'" in verdicts[-1].text


def test_a_canary_is_exact_or_as_likely_as_before():
    common = {"expected_ids": [5, 6, 7], "before": [-0.1, -0.2, -0.3], "max_drop": 1.0}
    assert gates.canary("c", answer_ids=[5, 6, 7], after=[-0.1] * 3, **common).passed
    other = gates.canary("c", answer_ids=[5, 9, 7], after=[-0.1] * 3, **common)
    assert not other.passed
    assert "differs from token 1 on" in other.text
    short = gates.canary("c", answer_ids=[5, 6], after=[-0.1] * 3, **common)
    assert not short.passed
    assert "another length" in short.text
    assert not gates.canary("c", answer_ids=None, after=[-0.6] * 3, **common).passed
    assert not gates.canary("c", answer_ids=[5, 6, 7], after=[-0.6] * 3, **common).passed  # right for now, and shaky
    assert gates.canary("c", answer_ids=None, after=[-0.5] * 3, **common).value == pytest.approx(0.9)


def test_norms_and_the_sentence_of_them_all():
    change = WeightChange(norm=3.0, relative=0.06, changed=10, total=40)
    all_ = [
        gates.update_norm(change, max_relative=0.05),
        gates.finite(change, [1.0]),
        gates.held_out([], [], max_rise=0),
    ]
    assert gates.verdict(all_) == (
        False,
        "rejected by update_norm: 10 of 40 weights changed, by 6.00e-02 of their norm, and not within the limit of "
        "0.05",
    )
    assert gates.verdict(all_[1:]) == (True, "passed finite, held_out")


# --- the watch


def watched(**options: float | str) -> RegressionWatch:
    watch = RegressionWatch(WatchSpec(metric="reward", **options))  # pyright: ignore[reportArgumentType]
    watch.activated(1)
    return watch


def test_a_served_metric_that_falls_is_told_once_and_with_numbers():
    watch, rng = watched(), random.Random(0)
    for _ in range(40):
        assert watch.add(1, float(rng.random() < 0.9)) is None
    watch.activated(2)
    told = [fall for _ in range(40) if (fall := watch.add(2, float(rng.random() < 0.3)))]
    assert len(told) == 1
    assert (told[0].version, told[0].samples) == (2, 16)
    assert told[0].before > 0.8 > 0.5 > told[0].now
    assert "'reward' went from" in told[0].text


def test_too_few_values_and_equal_ones_say_nothing():
    watch = watched()
    assert not any(watch.add(1, 1.0) for _ in range(15))
    watch.activated(2)
    assert not any(watch.add(2, 0.0) for _ in range(60))  # 15 before are one too few
    watch = watched()
    assert not any(watch.add(1, 1.0) for _ in range(60))
    watch.activated(2)
    assert not any(watch.add(2, 0.0) for _ in range(15))
    assert watch.add(2, 0.0)


def test_chance_alone_takes_nothing_back():
    """100 versions of equal quality; with no regard to noise a third of them would fall by 0.1."""
    rng, false, careless = random.Random(0), 0, 0
    for sigmas in (3.0, 0.0):
        for _ in range(100):
            watch = watched(sigmas=sigmas, window=32)
            for _ in range(32):
                watch.add(1, float(rng.random() < 0.5))
            watch.activated(2)
            fell = any(watch.add(2, float(rng.random() < 0.5)) for _ in range(32))
            false, careless = (false + fell, careless) if sigmas else (false, careless + fell)
    assert false <= 3
    assert careless > 20


def test_late_values_count_for_the_version_that_was_asked():
    watch = watched(window=16)
    for _ in range(16):
        watch.add(1, 1.0)
    watch.activated(2)
    for _ in range(10):
        assert watch.add(1, 1.0) is None
    fell = [watch.add(2, 0.0) for _ in range(16)]
    assert fell[15]
    assert fell[15].before == 1.0
    assert watch.add(3, -9.0) is None  # it is not there yet
    assert watch.add(2, NAN) is None


def test_lower_can_be_better_and_a_version_that_fell_is_no_measure():
    watch = watched(better="lower")
    for _ in range(16):
        watch.add(1, 1.0)
    watch.activated(2)
    assert [bool(watch.add(2, 2.0)) for _ in range(16)][-1]
    watch.activated(1, regressed=True)
    watch.activated(3)
    assert not any(watch.add(3, 1.0) for _ in range(64))  # against 1.0, not against 2.0
    assert watch.add(3, 9.0) is None
