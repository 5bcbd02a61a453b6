"""Gradient release, and training that trains nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import (
    PlainDescent,
    equal_rewards,
    make_group,
    make_narrow,
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
from tandem.errors import LogprobGap, NonFinite, NothingLearned, SpecError
from tandem.optim import master_weights as masters
from tandem.optim.update_rule import Slot
from tandem.spec.algorithm import DrGrpoSpec
from tandem.train.no_learning_check import Guard

pytestmark = pytest.mark.usefixtures("one_thread")


def test_release_wants_a_whole_step_in_one_micro_batch() -> None:
    with pytest.raises(SpecError, match=r"train.gradient_release.* this one has \d+; raise train.micro_tokens"):
        make_trainer(make_policy(), release=True).step(make_step(make_group(1), make_group(2), micro_tokens=16))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_under_release_a_loss_that_is_not_finite_moves_nothing(bad: float) -> None:
    policy = make_policy()
    trainer, before = make_trainer(policy, release=True), snapshot(policy)
    batch = make_step(make_group(1), micro_tokens=10**6)
    batch.micro[0].credit_N[2] = bad
    assert trainer.step(batch)["train/set_aside"] == 1.0
    assert same(before, snapshot(policy))
    assert trainer.version == 0


# --- training that trains nothing


class Nothing(PlainDescent):
    def update(self, slots: Sequence[Slot]) -> None:
        pass


@pytest.mark.parametrize(
    ("trainer", "group", "why"),
    [
        (lambda **o: make_trainer(make_policy(), **o), equal_rewards, "no token of the batch had any credit"),
        (
            lambda **o: make_trainer(
                policy := make_policy(), root_of_zero(1.0), optimizer=make_optimizer(policy, PlainDescent()), **o
            ),
            lambda: make_group(1),
            "gradient was zero",
        ),
        (lambda **o: make_narrow(masters.InPlace(), lr=lambda step: 1e-12, **o), lambda: make_group(1), "rounded away"),
        (
            lambda **o: make_trainer(policy := make_policy(), optimizer=make_optimizer(policy, Nothing()), **o),
            lambda: make_group(1),
            "the optimizer's updates are zero",
        ),
    ],
    ids=["no credit", "no gradient", "rounded away", "no update"],
)
def test_steps_in_a_row_that_move_nothing_end_the_run_and_say_why(trainer: Any, group: Any, why: str) -> None:
    idle = trainer(max_idle_steps=3)
    for _ in range(2):
        idle.step(make_step(group()))
    with pytest.raises(NothingLearned, match=rf"2 steps, and none of them changed a weight: .*{why}"):
        idle.finish()
    with pytest.raises(NothingLearned, match=rf"3 steps in a row, up to version 3, learned nothing: .*{why}"):
        idle.step(make_step(group()))


@pytest.mark.parametrize(("allowed", "first"), [(3, 3), (30, 20), (100, 20), (1000, 200)])
def test_a_run_that_never_learned_anything_ends_after_a_fifth_of_the_idle_steps(allowed: int, first: int) -> None:
    batch = make_step(equal_rewards())
    batch.metrics["tokens/credited"] = 0

    def steps_of(guard: Guard, version: int) -> int:
        for steps in range(1, allowed + 1):
            try:
                guard.stepped(version + steps, batch, {})
            except NothingLearned:
                return steps
        return 0

    assert steps_of(Guard(allowed), 0) == first
    learned = Guard(allowed)
    learned.stepped(1, make_step(make_group(2)), {"grad/norm": 1.0, "update/stored_fraction": 1.0})
    resumed = Guard(allowed)
    resumed.load(learned.state())
    assert steps_of(resumed, 1) == allowed


def test_what_the_guards_have_seen_outlives_a_load(tmp_path: Path) -> None:
    before = make_trainer(make_policy(), max_idle_steps=3)
    before.step(make_step(make_group(2)))
    for _ in range(2):
        before.step(make_step(equal_rewards()))
    before.save(tmp_path / "step-3")
    after = make_trainer(make_policy(), max_idle_steps=3)
    after.load(tmp_path / "step-3")
    after.finish()  # an earlier step has moved something
    with pytest.raises(NothingLearned, match="3 steps in a row, up to version 4"):
        after.step(make_step(equal_rewards()))


def test_flat_rewards_are_idle_even_where_a_kl_term_moves_weights() -> None:
    spec = DrGrpoSpec(kl_coef=0.5)
    policy = make_policy()
    policy.keep_reference()
    with torch.no_grad():
        for _, tensor in policy.trainable():
            tensor.add_(torch.randn_like(tensor), alpha=0.01)
    algorithm = dr_grpo.make(spec)
    trainer, before = make_trainer(policy, algorithm, max_idle_steps=2), snapshot(policy)
    trainer.step(make_step(equal_rewards(), algorithm=algorithm))
    assert not same(before, snapshot(policy))
    with pytest.raises(NothingLearned, match=r"2 steps in a row.* any credit"):
        trainer.step(make_step(equal_rewards(), algorithm=algorithm))


def test_under_release_gradients_that_are_not_finite_are_noted_and_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = make_policy()
    trainer = make_trainer(policy, release=True)
    weight = dict(policy.trainable())["model.layers.0.self_attn.v_proj.weight"]
    weight.register_hook(lambda gradient: gradient * math.nan)
    before = snapshot(policy)
    metrics = trainer.step(make_step(make_group(1), micro_tokens=10**6))
    assert metrics["release/skipped"] == 1
    assert trainer.set_aside == [[f"task-1-{index}" for index in range(4)]]
    assert "1 gradients are not finite: their weights are unchanged, others have changed" in caplog.text
    moved = {name for name, tensor in snapshot(policy).items() if not torch.equal(tensor, before[name])}
    assert moved == before.keys() - {"model.layers.0.self_attn.v_proj.weight"}
    trainer.step(make_step(make_group(2), micro_tokens=10**6))
    with pytest.raises(NonFinite, match="3 batches in a row"):
        trainer.step(make_step(make_group(3), micro_tokens=10**6))


def test_under_release_a_logprob_gap_ends_the_run_before_a_weight_moves() -> None:
    policy = make_policy()
    trainer, before = make_trainer(policy, release=True, max_logprob_gap=0.02), snapshot(policy)
    batch = make_step(on_policy(policy, make_group(1), off_by=0.5, version=0), micro_tokens=10**6)
    with pytest.raises(LogprobGap):
        trainer.step(batch)
    assert same(before, snapshot(policy))


def test_one_step_that_moves_something_forgives_idle_ones() -> None:
    trainer = make_trainer(make_policy(), max_idle_steps=3)
    for _ in range(2):
        trainer.step(make_step(equal_rewards()))
    trainer.step(make_step(make_group(2)))
    trainer.finish()
    for _ in range(2):
        trainer.step(make_step(equal_rewards()))
