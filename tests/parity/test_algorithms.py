"""Losses and credits against numbers that were worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tandem.algo import dr_grpo, grpo, policy_gradient, rloo, sft
from tandem.model.policy import CausalPolicy
from tandem.protocols import Algorithm
from tandem.spec.algorithm import AlgorithmSpec, DrGrpoSpec, GrpoSpec, RlooSpec
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.pack import make_batch
from tandem.types import Group, Metrics, MicroBatch, TokenLogprobs, Totals, Trajectory

CPU = torch.device("cpu")
Objective = Callable[[Tensor, Tensor, Tensor, AlgorithmSpec], tuple[Tensor, Metrics]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the objective: one token, its ratio to the engine's probability, its credit

# With clip_low 0.2, clip_high 0.28, ratio_cap 2. The gradient is that of the objective with respect to the logprob.
CLOSED_FORM = [
    # credit, ratio, value, gradient
    (+3.0, 0.50, 1.50, 1.50),  # below the clip: the pessimist's minimum is the ratio itself
    (+3.0, 0.90, 2.70, 2.70),
    (+3.0, 1.00, 3.00, 3.00),
    (+3.0, 1.27, 3.81, 3.81),
    (+3.0, 1.29, 3.84, 0.00),  # above the clip: no further push up
    (+3.0, 5.00, 3.84, 0.00),  # above the cap
    (-3.0, 0.50, -2.40, 0.00),  # below the clip: no further push down
    (-3.0, 0.79, -2.40, 0.00),
    (-3.0, 0.81, -2.43, -2.43),
    (-3.0, 1.00, -3.00, -3.00),
    (-3.0, 1.50, -4.50, -4.50),  # above the clip: still pushed down, by as much as it has risen
    (-3.0, 5.00, -6.00, -6.00),  # above the cap: with the cap as its weight
    (0.0, 1.10, 0.00, 0.00),
]
# With ratio_cap 1.1, below the clip: what has risen is still pushed up, with the cap as its weight.
CLOSED_FORM_LOW_CAP = [
    (+3.0, 1.05, 3.15, 3.15),
    (+3.0, 1.20, 3.30, 3.30),
    (+3.0, 5.00, 3.30, 3.30),
    (-3.0, 5.00, -3.30, -3.30),
]


def check_closed_form(objective: Objective) -> None:
    for cap, table in ((2.0, CLOSED_FORM), (1.1, CLOSED_FORM_LOW_CAP)):
        spec = DrGrpoSpec(clip_low=0.2, clip_high=0.28, ratio_cap=cap)
        credit_N, ratio_N, value_N, gradient_N = (torch.tensor(column) for column in zip(*table, strict=True))
        logprobs_N = torch.linspace(-0.1, -4, len(table)).requires_grad_()
        behaviour_N = logprobs_N.detach() - ratio_N.log()
        ours_N, _ = objective(logprobs_N, behaviour_N, credit_N, spec)
        torch.testing.assert_close(ours_N, value_N, atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.autograd.grad(ours_N.sum(), logprobs_N)[0], gradient_N, atol=1e-5, rtol=0)


def test_the_objective_and_its_gradient_have_their_closed_form() -> None:
    check_closed_form(policy_gradient.objective)


def maximum(logprobs_N: Tensor, behaviour_N: Tensor, credit_N: Tensor, spec: AlgorithmSpec) -> tuple[Tensor, Metrics]:
    ratio_N = (logprobs_N - behaviour_N).exp().clamp(max=spec.ratio_cap)
    return torch.maximum(ratio_N * credit_N, ratio_N.clamp(1 - spec.clip_low, 1 + spec.clip_high) * credit_N), {}


def clip_alone(logprobs_N: Tensor, behaviour_N: Tensor, credit_N: Tensor, spec: AlgorithmSpec) -> tuple[Tensor, Any]:
    return (logprobs_N - behaviour_N).exp().clamp(1 - spec.clip_low, 1 + spec.clip_high) * credit_N, {}


def dead_past_the_cap(logprobs_N: Tensor, behaviour_N: Tensor, credit_N: Tensor, spec: AlgorithmSpec) -> Any:
    ratio_N = (logprobs_N - behaviour_N).exp().clamp(max=spec.ratio_cap)
    return torch.minimum(ratio_N * credit_N, ratio_N.clamp(1 - spec.clip_low, 1 + spec.clip_high) * credit_N), {}


def sign_in_the_clip(logprobs_N: Tensor, behaviour_N: Tensor, credit_N: Tensor, spec: AlgorithmSpec) -> Any:
    """The classic: the clip of positive credits applied to the size of negative ones."""
    value_N, metrics = policy_gradient.objective(logprobs_N, behaviour_N, credit_N.abs(), spec)
    return value_N * credit_N.sign(), metrics


def upside_down(logprobs_N: Tensor, behaviour_N: Tensor, credit_N: Tensor, spec: AlgorithmSpec) -> Any:
    return policy_gradient.objective(-logprobs_N, -behaviour_N, credit_N, spec)


@pytest.mark.parametrize("wrong", [maximum, clip_alone, dead_past_the_cap, sign_in_the_clip, upside_down])
def test_the_closed_form_rejects_a_planted_error(wrong: Objective) -> None:
    with pytest.raises(AssertionError):
        check_closed_form(wrong)


def test_the_closed_form_rejects_our_objective_with_the_minimum_turned_into_a_maximum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "minimum", torch.maximum)
    with pytest.raises(AssertionError):
        check_closed_form(policy_gradient.objective)


def test_ratios_beyond_all_bounds_keep_the_loss_finite() -> None:
    behaviour_N = torch.tensor([-300.0, -300.0, 0.0, 0.0])
    logprobs_N = torch.tensor([0.0, 0.0, -300.0, -300.0], requires_grad=True)
    credit_N = torch.tensor([1.0, -1.0, 1.0, -1.0])
    value_N, _ = policy_gradient.objective(logprobs_N, behaviour_N, credit_N, DrGrpoSpec())
    (gradient_N,) = torch.autograd.grad(value_N.sum(), logprobs_N)
    assert value_N.tolist() == pytest.approx([1.28, -2.0, 0.0, -0.8])
    assert gradient_N.tolist() == pytest.approx([0.0, -2.0, 0.0, 0.0])


def test_clipped_and_capped_tokens_are_counted() -> None:
    ratio_N = torch.tensor([row[1] for row in CLOSED_FORM])
    credit_N = torch.tensor([row[0] for row in CLOSED_FORM])
    _, metrics = policy_gradient.objective(ratio_N.log(), torch.zeros(len(CLOSED_FORM)), credit_N, DrGrpoSpec())
    assert metrics["loss/clip_fraction"] == 4
    assert metrics["loss/cap_fraction"] == 2
    assert metrics["loss/ratio_mean"] == pytest.approx(sum(min(row[1], 2.0) for row in CLOSED_FORM))


# --- credits


def group_of(*samples: tuple[float, int]) -> Group:
    """(reward, trained tokens) of each sibling; the prompt is two tokens."""
    return [
        Trajectory(
            ids=[1, 2, *range(3, 3 + count)],
            trained=[False] * 2 + [True] * count,
            logprobs=[0.0] * 2 + [-1.0 - 0.25 * i for i in range(count)],
            versions=[-1] * 2 + [0] * count,
            reward=reward,
        )
        for reward, count in samples
    ]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # mean 0.5
        (dr_grpo.make(DrGrpoSpec()), [0.5, -0.5, 0.25, -0.25]),
        # spread sqrt((0.25 + 0.25 + 0.0625 + 0.0625) / 4) = 0.395285, and a floor of 0.1
        (grpo.make(GrpoSpec(spread_floor=0.1)), [1.009520, -1.009520, 0.504760, -0.504760]),
        # the others' means: 1/3, 2/3, 5/12, 7/12
        (rloo.make(RlooSpec()), [2 / 3, -2 / 3, 1 / 3, -1 / 3]),
    ],
    ids=lambda value: value.name if isinstance(value, Algorithm) else "",
)
def test_credits_are_what_a_hand_computes(algorithm: Algorithm, expected: Sequence[float]) -> None:
    credit = algorithm.credit([group_of((1.0, 2), (0.0, 1), (0.75, 4), (0.25, 3))])[0]
    assert [len(tokens) for tokens in credit] == [2, 1, 4, 3]
    for tokens, value in zip(credit, expected, strict=True):
        assert tokens == pytest.approx([value] * len(tokens), abs=1e-6)


def test_rloo_compares_each_with_the_mean_of_the_others() -> None:
    rewards = [3.0, -1.0, 0.5]
    credit = rloo.make(RlooSpec()).credit([group_of(*((reward, 1) for reward in rewards))])[0]
    assert [tokens[0] for tokens in credit] == pytest.approx([3.0 - -0.25, -1.0 - 1.75, 0.5 - 1.0])


@pytest.mark.parametrize("make", [lambda: dr_grpo.make(DrGrpoSpec()), lambda: grpo.make(GrpoSpec())])
def test_a_group_of_equals_is_not_kept(make: Callable[[], Algorithm]) -> None:
    keep = make().keep
    assert not keep(group_of((0.5, 2), (0.5, 3)))
    assert not keep(group_of((0.0, 0), (1.0, 0)))
    assert keep(group_of((0.5, 2), (0.25, 3)))


# --- how tokens are averaged


def score_of(micro: MicroBatch) -> TokenLogprobs:
    """On-policy: the engine's logprobs, as a leaf."""
    return TokenLogprobs(micro.behaviour_N.clone().requires_grad_(), torch.ones_like(micro.behaviour_N))


def gradient_by_length(algorithm: Algorithm, groups: Sequence[Group]) -> dict[int, float]:
    """Gradient of the loss at each token, by the number of trained tokens of its sequence."""
    batch = make_batch(groups, algorithm, micro_tokens=10**6, version=0, hidden_size=0, device=CPU)
    (micro,) = batch.micro
    scored = score_of(micro)
    loss, _ = algorithm.loss(scored, micro, batch.totals)
    (gradient_N,) = torch.autograd.grad(loss, scored.logprobs_N)
    return dict(zip(micro.length_N.int().tolist(), gradient_N.tolist(), strict=True))


def test_dr_grpo_counts_every_token_alike() -> None:
    """Credits +0.5 and -0.5 over 1 + 4 tokens."""
    found = gradient_by_length(dr_grpo.make(DrGrpoSpec()), [group_of((1.0, 1), (0.0, 4))])
    assert found == pytest.approx({1: -0.5 / 5, 4: 0.5 / 5})


def test_grpo_averages_within_each_sequence_first() -> None:
    """Credits +1 and -1 (spread 0.5, floor negligible), a half for each sequence, split over its own tokens."""
    found = gradient_by_length(grpo.make(GrpoSpec(spread_floor=1e-9)), [group_of((1.0, 1), (0.0, 4))])
    assert found == pytest.approx({1: -1 / 2, 4: 1 / (2 * 4)}, rel=1e-6)


def test_tokens_of_all_groups_share_one_average() -> None:
    groups = [group_of((1.0, 1), (0.0, 4)), group_of((1.0, 2), (0.0, 3))]
    found = gradient_by_length(dr_grpo.make(DrGrpoSpec()), groups)
    assert found == pytest.approx({1: -0.05, 4: 0.05, 2: -0.05, 3: 0.05})
    found = gradient_by_length(grpo.make(GrpoSpec(spread_floor=1e-9)), groups)
    assert found == pytest.approx({1: -1 / 4, 4: 1 / 16, 2: -1 / 8, 3: 1 / 12}, rel=1e-6)


def test_sft_is_the_mean_negative_logprob() -> None:
    algorithm, group = sft.make(), group_of((0.0, 1), (0.0, 4))
    batch = make_batch([group], algorithm, micro_tokens=100, version=0, hidden_size=0, device=CPU)
    scored = score_of(batch.micro[0])
    loss, _ = algorithm.loss(scored, batch.micro[0], batch.totals)
    assert loss.item() == pytest.approx((1.0 + 1.0 + 1.25 + 1.5 + 1.75) / 5)
    assert torch.autograd.grad(loss, scored.logprobs_N)[0].tolist() == pytest.approx([-0.2] * 5)


# --- the reference


def test_the_kl_term_has_its_closed_form() -> None:
    """exp(g) - g - 1 with g = reference - logprob: 0.306853 at ln 2, 0.193147 at -ln 2; gradient 1 - exp(g)."""
    algorithm = dr_grpo.make(DrGrpoSpec(kl_coef=0.5))
    assert algorithm.needs_reference
    (micro,) = make_batch(
        [group_of((1.0, 1), (0.0, 2))], algorithm, micro_tokens=100, version=0, hidden_size=0, device=CPU
    ).micro
    scored = score_of(micro)
    micro.credit_N = torch.zeros(3)
    micro.reference_N = scored.logprobs_N.detach() + torch.tensor([math.log(2), -math.log(2), 0.0])
    loss, metrics = algorithm.loss(scored, micro, Totals(tokens=3, sequences=2))
    assert loss.item() == pytest.approx(0.5 * (0.306853 + 0.193147) / 3, abs=1e-6)
    assert metrics["loss/kl"] == pytest.approx(0.5, abs=1e-5)
    (gradient_N,) = torch.autograd.grad(loss, scored.logprobs_N)
    assert gradient_N.tolist() == pytest.approx([0.5 * -1.0 / 3, 0.5 * 0.5 / 3, 0.0], abs=1e-6)


def test_without_a_coefficient_no_reference_is_asked_for() -> None:
    assert not dr_grpo.make(DrGrpoSpec()).needs_reference
    assert not grpo.make(GrpoSpec()).needs_reference
    assert not rloo.make(RlooSpec()).needs_reference


# --- against plain REINFORCE, on a real model


@pytest.fixture(scope="module")
def policy() -> CausalPolicy:
    tokenizer = byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, initializer_range=0.2, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    return CausalPolicy(transformers.LlamaForCausalLM(config), tokenizer)


def naive_logprobs(policy: CausalPolicy, trajectory: Trajectory) -> Tensor:
    ids_T = torch.tensor(trajectory.ids)
    logprobs_TV = policy.module(input_ids=ids_T[None]).logits[0, :-1].log_softmax(-1)
    return logprobs_TV.gather(-1, ids_T[1:, None]).squeeze(-1)[torch.tensor(trajectory.trained[1:])]


@pytest.mark.parametrize("make", [lambda: dr_grpo.make(DrGrpoSpec()), lambda: rloo.make(RlooSpec())])
def test_the_first_step_on_policy_is_reinforce(policy: CausalPolicy, make: Callable[[], Algorithm]) -> None:
    algorithm = make()
    group = group_of((1.0, 5), (0.0, 3), (0.25, 7))
    for trajectory in group:
        sampled = iter(naive_logprobs(policy, trajectory).tolist())
        trajectory.logprobs = [next(sampled) if trained else 0.0 for trained in trajectory.trained]
    batch = make_batch([group], algorithm, micro_tokens=10**6, version=0, hidden_size=0, device=CPU)
    loss, metrics = algorithm.loss(policy.logprobs(batch.micro[0], 1.0), batch.micro[0], batch.totals)
    assert metrics["loss/ratio_mean"] / batch.totals.tokens == pytest.approx(1.0, abs=1e-5)
    credit = [tokens[0] for tokens in algorithm.credit([group])[0]]
    reinforce = -sum(a * naive_logprobs(policy, t).sum() for a, t in zip(credit, group, strict=True)) / 15
    parameters = [tensor for _, tensor in policy.trainable()]
    for ours, theirs in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(reinforce, parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [lambda: dr_grpo.make(DrGrpoSpec()), lambda: grpo.make(GrpoSpec())])
def test_a_small_step_makes_the_better_sample_likelier_and_the_worse_less_likely(
    policy: CausalPolicy, make: Callable[[], Algorithm]
) -> None:
    algorithm, group = make(), group_of((1.0, 4), (0.0, 4))
    group[1].ids[2:] = [9, 8, 7, 6]
    with torch.no_grad():
        before = [naive_logprobs(policy, trajectory) for trajectory in group]
    for trajectory, logprobs in zip(group, before, strict=True):
        trajectory.logprobs = [0.0, 0.0, *logprobs.tolist()]
    batch = make_batch([group], algorithm, micro_tokens=10**6, version=0, hidden_size=0, device=CPU)
    loss, _ = algorithm.loss(policy.logprobs(batch.micro[0], 1.0), batch.micro[0], batch.totals)
    parameters = [tensor for _, tensor in policy.trainable()]
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for tensor, gradient in zip(parameters, gradients, strict=True):
            tensor -= 1e-3 * gradient
        after = [naive_logprobs(policy, trajectory) for trajectory in group]
        for tensor, gradient in zip(parameters, gradients, strict=True):
            tensor += 1e-3 * gradient
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()
