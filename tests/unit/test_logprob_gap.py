"""The logprob gap of a batch: the limit that the first batch sets, and the gap of older tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainers import CPU, make_group, make_policy, make_step, make_trainer

from tandem.errors import LogprobGap
from tandem.model.policy import CausalPolicy
from tandem.train.batch_packing import plain_row
from tandem.train.logprob_gap import Gap, GapWatch, limits_for
from tandem.types import Group, Metrics

BF16 = limits_for(exact=False, layers=24)


def gap(**off_by_lag: float) -> Gap:
    """Of 10 tokens for each lag: lag0=0.01, lag1=0.02."""
    return Gap({int(name[3:]): [10 * off, off, 10] for name, off in off_by_lag.items()})


def test_the_first_batch_sets_the_limit_and_says_so_once() -> None:
    watch = GapWatch(BF16)
    told: list[tuple[Any, str]] = []
    watch.on_limit = lambda asked, text: told.append((asked, text))
    assert watch.accept(gap(lag0=0.04))["sync/logprob_gap_limit"] == pytest.approx(0.12)
    assert watch.accept(gap(lag0=0.11))["sync/logprob_gap_limit"] == pytest.approx(0.12)
    why = "3 x the first batch's gap of 0.04 over 10 tokens, or 0.05 if that is more (16 bits, 24 layers)"
    assert told == [("auto", f"0.1200 nats: {why}")]
    with pytest.raises(LogprobGap, match=r"max_logprob_gap = 'auto' \(0\.1200 by the first batch"):
        watch.accept(gap(lag0=0.13))


def test_a_first_batch_above_the_ceiling_sets_no_limit() -> None:
    watch = GapWatch(BF16)
    for _ in range(2):
        with pytest.raises(LogprobGap, match=r"'auto' \(0\.1200 for the first batch"):
            watch.accept(gap(lag0=0.13))


@pytest.mark.parametrize(("exact", "layers", "floor"), [(True, 64, 0.005), (False, 8, 0.05), (False, 96, 0.1)])
def test_the_limit_is_wider_in_16_bits_and_in_deep_models(exact: bool, layers: int, floor: float) -> None:
    watch = GapWatch(limits_for(exact=exact, layers=layers))
    assert watch.accept(gap(lag0=1e-6))["sync/logprob_gap_limit"] == pytest.approx(floor)


def test_a_number_in_the_spec_wins() -> None:
    watch = GapWatch(0.3)
    assert watch.accept(gap(lag0=0.2))["sync/logprob_gap_limit"] == 0.3
    with pytest.raises(LogprobGap, match=r"train\.max_logprob_gap = 0\.3:"):
        watch.accept(gap(lag0=0.31))


def test_older_tokens_may_differ_by_what_the_policy_moved_and_no_more() -> None:
    watch = GapWatch(0.05)
    metrics = watch.accept(gap(lag1=0.9))  # nothing is known yet: 1 nat for a version
    assert metrics["sync/logprob_gap_older"] == pytest.approx(0.9)
    assert metrics["sync/logprob_gap_seen"] == 1.0
    assert "sync/logprob_gap" not in metrics
    watch = GapWatch(0.05)
    for _ in range(5):
        watch.accept(gap(lag0=0.01, lag1=0.01, lag2=0.03))
    watch.accept(gap(lag1=0.24))
    with pytest.raises(LogprobGap, match=r"tokens that are 1 version old, and the limit is 0\.2500"):
        watch.accept(gap(lag1=0.26))
    watch.accept(gap(lag2=0.44))
    with pytest.raises(LogprobGap, match="tokens that are 2 versions old"):
        watch.accept(gap(lag2=0.46))


def test_a_policy_that_moves_fast_may_go_on_but_not_without_bounds() -> None:
    watch = GapWatch(0.05)
    for _ in range(20):
        watch.accept(gap(lag1=0.15))
    watch.accept(gap(lag1=0.6))
    watch = GapWatch(0.05)
    for moved in (0.3, 0.5, 0.9, 1.0, 1.0, 1.0):
        watch.accept(gap(lag1=moved))
    with pytest.raises(LogprobGap, match=r"the limit is 1\.0500"):
        watch.accept(gap(lag1=1.1))


def test_tokens_of_an_unknown_version_are_not_looked_at_and_that_shows() -> None:
    seen = gap(lag0=0.01)
    seen.join(Gap(unknown=30))
    assert GapWatch(BF16).accept(seen)["sync/logprob_gap_seen"] == 0.25


def test_tokens_are_told_apart_by_their_version() -> None:
    versions_N, behaviour_N = torch.tensor([4, 3, 3, -2, -1]), torch.zeros(5)
    micro: Any = SimpleNamespace(versions_N=versions_N, behaviour_N=behaviour_N)
    scored: Any = SimpleNamespace(logprobs_N=torch.tensor([0.5, -0.1, 0.3, 9.0, 9.0]))
    found = Gap()
    found.add(scored, micro, 4)
    found.join(Gap.of(found.numbers()))
    assert found.by_lag == {0: [1.0, 0.5, 2], 1: pytest.approx([0.8, 0.3, 4])}
    assert found.unknown == 2


def test_a_checkpoint_keeps_the_limit_and_what_the_policy_moved() -> None:
    watch, resumed = GapWatch(BF16), GapWatch(BF16)
    watch.accept(gap(lag0=0.04, lag1=0.2))
    resumed.load(watch.state())
    assert resumed.state() == watch.state()
    assert math.isclose(resumed.accept(gap(lag0=0.01))["sync/logprob_gap_limit"], 0.12)
    fixed = GapWatch(0.3)
    fixed.load(watch.state())  # the spec now says a number
    assert fixed.accept(gap(lag0=0.2))["sync/logprob_gap_limit"] == 0.3


# --- a trainer whose batches are one version old


def sampled_by(policy: CausalPolicy, seed: int, version: int) -> Group:
    """Siblings with the logprobs that this policy gives them now, under the stamp of a version."""
    group = make_group(seed, version)
    for each in group:
        first = each.trained.index(True)
        ours = policy.score(plain_row(each.ids, first, CPU), 1.0).tolist()
        each.logprobs = [0.0] * first + ours
    return group


@pytest.mark.parametrize("stale", [False, True])
def test_at_a_lag_of_one_a_healthy_run_goes_on_and_tokens_of_another_version_end_it(stale: bool) -> None:
    policy, start = make_policy(), make_policy()
    limit = limits_for(exact=True, layers=2)
    trainer = make_trainer(policy, lr=lambda step: 3e-3, max_logprob_gap=limit, measure_moves=True)
    waiting, seen = [sampled_by(policy, 0, 0)], list[Metrics]()
    for step in range(12):
        waiting.append(sampled_by(policy, step + 1, trainer.version))  # while the trainer is busy with the one before
        seen.append(trainer.step(make_step(waiting.pop(0), version=trainer.version)))
    assert all(metrics["sync/logprob_gap_seen"] == 1.0 for metrics in seen)
    assert all("sync/logprob_gap_older" in metrics for metrics in seen[1:])
    wrong = sampled_by(start if stale else policy, 99, trainer.version - 1)
    if not stale:
        trainer.step(make_step(wrong, version=trainer.version))
        return
    with pytest.raises(LogprobGap, match="1 version old"):
        trainer.step(make_step(wrong, version=trainer.version))


@pytest.mark.parametrize("measured", [False, True])
def test_weights_that_are_wrong_by_more_than_an_update_are_seen_if_updates_are_measured(measured: bool) -> None:
    policy, wrong = make_policy(), make_policy()
    limit = limits_for(exact=True, layers=2)
    trainer = make_trainer(policy, lr=lambda step: 1e-4, max_logprob_gap=limit, measure_moves=measured)
    for step in range(6):
        now = sampled_by(policy, step, trainer.version)
        trainer.step(make_step(now, version=trainer.version))
    healthy = sampled_by(policy, 98, trainer.version)
    with torch.no_grad():
        for (_, ours), (_, theirs) in zip(policy.trainable(), wrong.trainable(), strict=True):
            theirs.copy_(ours * 1.05)
    scaled = sampled_by(wrong, 99, trainer.version)
    trainer.step(make_step(sampled_by(policy, 97, trainer.version), version=trainer.version))
    metrics = trainer.step(make_step(healthy, version=trainer.version))
    assert metrics["sync/logprob_gap_older"] < metrics["sync/logprob_gap_older_limit"]
    if not measured:
        trainer.step(make_step(scaled, version=trainer.version))
        return
    with pytest.raises(LogprobGap, match=r"for what the policy moved: the tokens are of another version"):
        trainer.step(make_step(scaled, version=trainer.version))
