"""Rejection sampling: which answers are chosen, and that training on them is supervised training on them."""

from __future__ import annotations

import pytest
import torch
from samples import CPU, algorithm_of, group_of, micro_of

from tandem.algo import sft
from tandem.ops.byte_sizes import shares_never
from tandem.protocols import Algorithm
from tandem.train.batch_packing import make_batch
from tandem.types import Batch, Group, Totals


def batch_of(algorithm: Algorithm, *groups: Group) -> Batch:
    return make_batch(groups, algorithm, micro_tokens=64, version=1, shares=shares_never, device=CPU)


CHOSEN = {
    "the best one": (1, (0.0, 0.5, 1.0), [2]),
    "two of three": (2, (0.0, 0.5, 1.0), [1, 2]),
    "never the worst": (3, (0.0, 0.5, 1.0), [1, 2]),
    "all right ones, where there are fewer": (4, (1.0, 0.0, 1.0, 0.0), [0, 2]),
    "the first of equal ones": (1, (0.0, 1.0, 1.0), [1]),
    "rewards below zero": (1, (-3.0, -1.0, -2.0), [1]),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_the_best_answers_are_chosen_and_the_others_left_out(case: str):
    best, rewards, chosen = CHOSEN[case]
    group = group_of(*((reward, 2 + number) for number, reward in enumerate(rewards)))
    (credit,) = algorithm_of("rejection_sampling", best=best).credit([group])
    assert [number for number, each in enumerate(credit) if each] == chosen
    assert all(set(each) <= {1.0} and len(each) in (0, 2 + number) for number, each in enumerate(credit))


def test_a_penalty_for_length_decides_between_equal_rewards_only():
    group = group_of((0.0, 2), (1.0, 2), (1.0, 2))
    group[0].shaping, group[1].shaping = 5.0, -0.5
    (credit,) = algorithm_of("rejection_sampling").credit([group])
    assert [number for number, each in enumerate(credit) if each] == [2]


def test_a_step_is_a_supervised_step_on_the_chosen_answers():
    groups = [group_of((0.0, 5), (1.0, 3)), group_of((0.2, 2), (0.1, 7)), group_of((1.0, 4), (1.0, 4))]
    made = batch_of(algorithm_of("rejection_sampling"), *groups)
    plain = batch_of(sft.make(), [groups[0][1]], [groups[1][0]])
    assert made.totals == plain.totals == Totals(5, 2)
    assert made.metrics["tokens/computed"] == plain.metrics["tokens/computed"]
    losses, gradients = [], []
    for algorithm in (algorithm_of("rejection_sampling"), sft.make()):
        scored, micro = micro_of([(1.0, [1.0, 1.0, 1.0]), (1.0, [1.0, 1.0])])
        loss, _ = algorithm.loss(scored, micro, made.totals)
        loss.backward()
        losses.append(loss.item())
        gradients.append(scored.logprobs_N.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert losses[0] == pytest.approx(-1.0)  # of weights, as in every policy gradient; sft says the log probability
    assert losses[1] > 0


def test_an_older_token_weighs_by_its_ratio_up_to_the_cap():
    scored, micro = micro_of([(1.0, [0.5, 3.0])])
    loss, metrics = algorithm_of("rejection_sampling").loss(scored, micro, Totals(2, 1))
    loss.backward()
    assert scored.logprobs_N.grad is not None
    assert scored.logprobs_N.grad.tolist() == pytest.approx([-0.25, -1.0])
    assert metrics["loss/ratio_mean"] == pytest.approx(2.5)
