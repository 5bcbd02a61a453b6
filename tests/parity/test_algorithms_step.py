"""A whole step of each algorithm: however it is cut the gradient is the same, and steps make rewards rise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from samples import CORRECTED, CPU, FROM_REWARDS, algorithm_of
from torch import Tensor

from tandem.algo import gspo, importance_ratio, policy_gradient, sft
from tandem.ops.byte_sizes import Shares, shares_never, shares_unmasked
from tandem.protocols import Algorithm
from tandem.train.batch_packing import make_batch
from tandem.types import Group, Metrics, MicroBatch, TokenLogprobs, Totals, Trajectory, TrajectoryStatus

# --- however the step is cut: every token of the step has an id, and so a logprob, of its own

PROMPT = list(range(5))
ROOMY = 10**6
LOGPROBS_I, REFERENCE_I = -2.5 * torch.rand(2, 200, generator=torch.Generator().manual_seed(5))


def make_groups(seed: int) -> list[Group]:
    rng = random.Random(seed)
    fresh = iter(range(len(PROMPT), len(LOGPROBS_I)))
    groups: list[Group] = []
    for _ in range(4):
        group: Group = []
        for _ in range(3):
            turns = [rng.randint(1, 6), rng.randint(0, 3)]  # two turns with another's word in between
            trained = [False] * len(PROMPT) + [True] * turns[0] + [False] + [True] * turns[1]
            ids = [*PROMPT, *(next(fresh) for _ in trained[len(PROMPT) :])]
            logprobs = [
                LOGPROBS_I[i].item() + rng.gauss(0.0, 0.2) if t else 0.0 for i, t in zip(ids, trained, strict=True)
            ]
            status: TrajectoryStatus = "truncated" if rng.random() < 0.5 else "finished"
            group.append(Trajectory(ids, trained, logprobs, [0] * len(ids), rng.choice([0.0, 0.3, 1.0]), status))
        groups.append(group)
    groups[1][0].reward, groups[1][1].reward = 0.0, 1.0  # one at least with signal,
    for trajectory in groups[2]:
        trajectory.reward = 0.3  # and one without
    return groups


@dataclass(frozen=True)
class Step:
    loss: float
    gradient_I: Tensor
    """By token id."""
    sums: Metrics
    num_micro: int


def step_of(
    algorithm: Algorithm, groups: Sequence[Group], micro_tokens: int = ROOMY, shares: Shares = shares_never
) -> Step:
    logprobs_I = LOGPROBS_I.clone().requires_grad_()
    batch = make_batch(groups, algorithm, micro_tokens=micro_tokens, version=0, shares=shares, device=CPU)
    loss, sums = 0.0, Metrics()
    for micro in batch.micro:
        ids_N = micro.ids_BT.flatten()[micro.target_N]
        micro.reference_N = REFERENCE_I[ids_N] if algorithm.needs_reference else None
        part, metrics = algorithm.loss(TokenLogprobs(logprobs_I[ids_N], torch.ones(len(ids_N))), micro, batch.totals)
        part.backward()
        loss += part.item()
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in metrics.items()}
    assert logprobs_I.grad is not None
    return Step(loss, logprobs_I.grad, sums, len(batch.micro))


def check_same(found: Step, expected: Step) -> None:
    torch.testing.assert_close(found.gradient_I, expected.gradient_I, atol=1e-6, rtol=1e-5)
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert found.sums == pytest.approx(expected.sums, abs=1e-4)


def check_cuts(algorithm: Algorithm) -> None:
    groups = make_groups(0)
    whole = step_of(algorithm, groups)
    assert whole.num_micro == 1
    assert bool(whole.gradient_I.any())
    pieces = {
        (size, shares): step_of(algorithm, groups, size, shares)
        for size in (8, 20, 60)
        for shares in (shares_never, shares_unmasked)
    }
    assert max(step.num_micro for step in pieces.values()) >= 5
    for step in pieces.values():
        check_same(step, whole)
    turned = [list(reversed(group)) for group in reversed(groups)]
    for size in (8, ROOMY):
        check_same(step_of(algorithm, turned, size), whole)
    untrained = {
        i for group in groups for t in group for i, trained in zip(t.ids, t.trained, strict=True) if not trained
    }
    assert not whole.gradient_I[sorted(untrained)].any()


CORRECTIONS = ["truncate_token", "truncate_sequence", "mask_token", "mask_sequence", "none"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FROM_REWARDS),
    *((name, {"kl_coef": 0.3, "kl_estimator": kl}) for name in FROM_REWARDS for kl in ("k1", "k2", "k3")),
    *((name, {"correction": {"kind": kind}}) for name in CORRECTED for kind in CORRECTIONS),
    ("dapo", {"overlong_buffer": 14}),
    ("reinforce_pp", {"baseline": "group"}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.28}),
    ("dr_grpo", {"advantage_clip": 0.1}),
    *(("distill", {"reward_coef": 0.5, "correction": {"kind": kind}}) for kind in CORRECTIONS),
    ("distill", {"advantage_clip": 0.2}),
]


@pytest.mark.parametrize(("name", "spec"), VARIANTS, ids=str)
def test_the_step_does_not_depend_on_how_it_is_cut_or_packed(name: str, spec: dict[str, Any]) -> None:
    check_cuts(algorithm_of(name, **spec))


def test_nor_does_a_supervised_step() -> None:
    check_cuts(sft.make())


def mean_of_the_micro_batch(micro: MicroBatch, totals: Totals) -> Tensor:
    return micro.length_N.new_full(micro.length_N.shape, 1 / len(micro.length_N))


def mean_over_its_sequences(micro: MicroBatch, totals: Totals) -> Tensor:
    return 1 / (micro.length_N * len(micro.group_S))


def by_position(values_N: Tensor, micro: MicroBatch) -> Tensor:
    """As if neighbours were of one sequence."""
    return values_N.cumsum(0)


@pytest.mark.parametrize(
    ("name", "module", "attribute", "wrong"),
    [
        ("dr_grpo", policy_gradient, "token_mean", mean_of_the_micro_batch),
        ("grpo", policy_gradient, "sequence_mean", mean_over_its_sequences),
        ("gspo", gspo.policy_gradient, "sequence_mean", mean_over_its_sequences),
        ("gspo", importance_ratio, "sequence_sum", by_position),
    ],
)
def test_a_share_of_the_micro_batch_is_rejected(
    name: str, module: Any, attribute: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, attribute, wrong)
    with pytest.raises(AssertionError):
        check_cuts(algorithm_of(name))


# --- a bandit: two pulls of five arms an episode

ARMS = 5
WORTH = [0.0, 0.1, 0.2, 0.3, 1.0]


def play(logprobs_PA: Tensor, rng: torch.Generator, num_groups: int = 8, group_size: int = 8) -> list[Group]:
    """Two positions, A arms. Token ids: 0 is the prompt, then the arms of the first pull, then of the second."""
    groups: list[Group] = []
    for _ in range(num_groups):
        pulls_GP = torch.stack([torch.multinomial(p.exp(), group_size, True, generator=rng) for p in logprobs_PA], 1)
        groups.append(
            [
                Trajectory(
                    [0, 1 + first, 1 + ARMS + second],
                    [False, True, True],
                    [0.0, logprobs_PA[0, first].item(), logprobs_PA[1, second].item()],
                    [0] * 3,
                    reward=(WORTH[first] + WORTH[second]) / 2,
                )
                for first, second in pulls_GP.tolist()
            ]
        )
    return groups


def worth(logits_PA: Tensor) -> float:
    return (logits_PA.softmax(-1) @ torch.tensor(WORTH)).mean().item()


def learn(algorithm: Algorithm, steps: int, teacher_PA: Tensor | None = None, times: int = 2) -> tuple[float, Tensor]:
    """Every batch is used `times` times, so that ratios leave 1. What the bandit is worth then, and its logits."""
    rng = torch.Generator().manual_seed(0)
    logits_PA = torch.zeros(2, ARMS, requires_grad=True)
    optimizer = torch.optim.SGD([logits_PA], lr=1.0)
    for _ in range(steps):
        groups = play(logits_PA.detach().log_softmax(-1), rng)
        batch = make_batch(groups, algorithm, micro_tokens=64, version=0, shares=shares_never, device=CPU)
        for _ in range(times):
            optimizer.zero_grad()
            for micro in batch.micro:
                ids_N = micro.ids_BT.flatten()[micro.target_N] - 1
                logprobs_N = logits_PA.log_softmax(-1).flatten()[ids_N]
                if teacher_PA is not None:
                    micro.reference_N = teacher_PA.log_softmax(-1).flatten()[ids_N]
                algorithm.loss(TokenLogprobs(logprobs_N, torch.zeros(len(ids_N))), micro, batch.totals)[0].backward()
            optimizer.step()
    return worth(logits_PA.detach()), logits_PA.detach()


LEARNERS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FROM_REWARDS),
    ("reinforce_pp", {"baseline": "group"}),
    *(("dr_grpo", {"correction": {"kind": kind}}) for kind in CORRECTIONS),
]


@pytest.mark.parametrize(("name", "spec"), LEARNERS, ids=str)
def test_a_bandit_learns_which_arm_is_best(name: str, spec: dict[str, Any]) -> None:
    assert worth(torch.zeros(2, ARMS)) == pytest.approx(0.32)
    found, logits_PA = learn(algorithm_of(name, **spec), steps=30)
    assert found > 0.55
    assert logits_PA.argmax(-1).tolist() == [ARMS - 1, ARMS - 1]


def test_a_distilled_bandit_becomes_its_teacher() -> None:
    teacher_PA = torch.tensor([[0.0, 2.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 3.0, 0.0]])

    def distance(logits_PA: Tensor) -> float:
        logprobs_PA = logits_PA.log_softmax(-1)
        return (logprobs_PA.exp() * (logprobs_PA - teacher_PA.log_softmax(-1))).sum().item()

    _, logits_PA = learn(algorithm_of("distill"), steps=40, teacher_PA=teacher_PA)
    assert distance(logits_PA) < 0.05 * distance(torch.zeros(2, ARMS))
    found, _ = learn(algorithm_of("distill", reward_coef=3.0), steps=40, teacher_PA=teacher_PA)
    assert found > worth(logits_PA) + 0.1  # rewards pull it away from the teacher
