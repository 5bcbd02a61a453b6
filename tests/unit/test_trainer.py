"""What a trainer does with a batch, good or bad."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from trainers import (
    TOKENIZER,
    PlainDescent,
    make_group,
    make_optimizer,
    make_policy,
    make_step,
    make_trainer,
    on_policy,
    root_of_zero,
    same,
    snapshot,
)

from tandem.algo import dr_grpo
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.errors import LogprobGap, NonFinite
from tandem.optim.schedule import lr_share
from tandem.protocols import Algorithm
from tandem.spec.algorithm import DrGrpoSpec
from tandem.spec.optim import CosineSchedule
from tandem.types import Batch, Sampling, Trajectory

pytestmark = pytest.mark.usefixtures("one_thread")

# --- a step


def test_a_step_is_a_version_and_says_what_it_did() -> None:
    policy = make_policy()
    trainer, before = make_trainer(policy, version=10), snapshot(policy)
    metrics = trainer.step(make_step(make_group(1), version=10))
    assert trainer.version == 11
    assert not same(before, snapshot(policy))
    assert metrics["train/set_aside"] == 0.0
    assert metrics["lr"] == 1e-2
    assert metrics["tokens/trained"] == sum(trajectory.num_trained for trajectory in make_group(1))
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_learning_rate_follows_the_stages_own_steps() -> None:
    schedule = CosineSchedule(final=0.1, warmup_steps=2)
    policy = make_policy()
    trainer = make_trainer(policy, lr=lambda step: 1e-2 * lr_share(schedule, step, 5), version=30)
    rates = [trainer.step(make_step(make_group(seed)))["lr"] for seed in range(5)]
    assert rates == pytest.approx([1e-2 * share for share in (1 / 3, 2 / 3, 1, 0.55, 0.1)])


@pytest.mark.parametrize("clip_norm", [0.05, 1e9])
def test_the_gradients_global_norm_is_cut_to_clip_norm(clip_norm: float) -> None:
    policy = make_policy()
    optimizer = make_optimizer(policy, PlainDescent())
    trainer = make_trainer(policy, optimizer=optimizer, lr=lambda step: 1.0, clip_norm=clip_norm)
    before = snapshot(policy)
    metrics = trainer.step(make_step(make_group(1), make_group(2), micro_tokens=16))
    moved = math.sqrt(sum((tensor - before[name]).square().sum().item() for name, tensor in snapshot(policy).items()))
    assert metrics["grad/norm"] > 0.05
    assert moved == pytest.approx(min(clip_norm, metrics["grad/norm"]), rel=1e-3)


def test_equal_rewards_make_a_step_that_moves_nothing() -> None:
    policy, group = make_policy(), make_group(1)
    for trajectory in group:
        trajectory.reward = 0.5
    trainer, before = make_trainer(policy), snapshot(policy)
    metrics = trainer.step(make_step(group))
    assert (trainer.version, metrics["loss/total"], metrics["grad/norm"]) == (1, 0.0, 0.0)
    assert same(before, snapshot(policy))


# --- what is not a number never reaches the weights


def spoiled(value: float) -> Batch:
    """Four micro-batches, and one token of one of them has a credit that is no number."""
    batch = make_step(make_group(1), make_group(2), micro_tokens=24)
    assert len(batch.micro) >= 4
    batch.micro[1].credit_N[2] = value
    return batch


def root_of_zero_while(bad_now: list[bool]) -> Algorithm:
    whole, bad = dr_grpo.make(DrGrpoSpec()), root_of_zero()
    return Algorithm("at times", whole.keep, whole.credit, lambda *given: (bad if bad_now else whole).loss(*given))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "gradient"])
def test_what_is_not_finite_never_reaches_weights_optimizer_or_clock(bad: Any) -> None:
    policy, twin = make_policy(), make_policy()
    bad_now: list[bool] = []
    trainer, undisturbed = make_trainer(policy, root_of_zero_while(bad_now)), make_trainer(twin)
    for each in (trainer, undisturbed):
        each.step(make_step(make_group(7)))
    before = snapshot(policy)
    if bad == "gradient":
        bad_now.append(True)
        batch = make_step(make_group(1), make_group(2))
    else:
        batch = spoiled(bad)
    metrics = trainer.step(batch)
    bad_now.clear()
    assert metrics["train/set_aside"] == 1.0
    assert trainer.version == 1
    assert trainer.set_aside == [[f"task-{seed}-{index}" for seed in (1, 2) for index in range(4)]]
    assert same(before, snapshot(policy))
    for each in (trainer, undisturbed):
        each.step(make_step(make_group(8)))
    assert same(snapshot(policy), snapshot(twin)), "as if the bad batch had never come"


def test_three_bad_batches_in_a_row_end_the_run_and_a_good_one_forgives() -> None:
    policy = make_policy()
    trainer = make_trainer(policy)
    for _ in range(2):
        trainer.step(spoiled(math.nan))
    trainer.step(make_step(make_group(3)))
    before = snapshot(policy)
    for _ in range(2):
        trainer.step(spoiled(math.nan))
    with pytest.raises(NonFinite, match=r"3 batches in a row.*task-1-0"):
        trainer.step(spoiled(math.nan))
    assert len(trainer.set_aside) == 5
    assert same(before, snapshot(policy))


# --- engine and trainer must agree


@pytest.mark.parametrize("off_by", [0.03, -0.03])
def test_logprobs_of_this_version_that_are_off_end_the_run(off_by: float) -> None:
    policy = make_policy()
    trainer, before = make_trainer(policy, version=4, max_logprob_gap=0.02), snapshot(policy)
    batch = make_step(on_policy(policy, make_group(1), off_by=off_by, version=4), version=4)
    with pytest.raises(LogprobGap, match=r"differ by 0\.0300 nats"):
        trainer.step(batch)
    assert same(before, snapshot(policy))


@pytest.mark.parametrize(("off_by", "version", "gap"), [(0.0, 4, 0.0), (0.01, 4, 0.01), (0.2, 3, None)])
def test_a_small_gap_is_reported_and_older_tokens_may_differ(off_by: float, version: int, gap: float | None) -> None:
    policy = make_policy()
    trainer = make_trainer(policy, version=4, max_logprob_gap=0.02)
    metrics = trainer.step(make_step(on_policy(policy, make_group(1), off_by=off_by, version=version), version=4))
    if gap is None:
        assert "sync/logprob_gap" not in metrics
    else:
        assert metrics["sync/logprob_gap"] == pytest.approx(gap, abs=1e-5)
        assert metrics["sync/logprob_gap_max"] == pytest.approx(gap, abs=1e-5)


def test_the_temperature_of_the_rollouts_is_the_trainers() -> None:
    """Tokens that the embedded engine samples at 0.7 are no gap for a trainer at 0.7, and one for a trainer at 1."""
    policy = make_policy()

    async def sample() -> Any:
        engine = EmbeddedEngine(policy.module, num_ids=len(TOKENIZER), end_ids=frozenset(), decode=TOKENIZER.decode)
        sampling = [Sampling(max_tokens=12, temperature=0.7, seed=seed) for seed in range(4)]
        try:
            return await asyncio.gather(*(engine.generate([1, 2, 3], s) for s in sampling))
        finally:
            await engine.close()

    group = [
        Trajectory([1, 2, 3, *c.ids], [False] * 3 + [True] * 12, [0.0] * 3 + c.logprobs, [-1] * 3 + [0] * 12, reward=r)
        for r, c in enumerate(asyncio.run(sample()))
    ]
    right = make_trainer(make_policy(), temperature=0.7, max_logprob_gap=0.02)
    assert right.step(make_step(group))["sync/logprob_gap"] < 1e-5
    with pytest.raises(LogprobGap):
        make_trainer(make_policy(), temperature=1.0, max_logprob_gap=0.02).step(make_step(group))
