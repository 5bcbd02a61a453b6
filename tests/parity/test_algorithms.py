"""Credits and averages against numbers that were worked out by hand, and the first step against REINFORCE."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from pydantic import TypeAdapter, ValidationError
from samples import CPU, FROM_REWARDS, MAKERS, MAX_TOKENS, algorithm_of, group_of, scored
from torch import Tensor

from tandem.algo import dapo, dr_grpo, grpo, rloo, sft
from tandem.build import training
from tandem.model.policy import CausalPolicy
from tandem.ops.byte_sizes import shares_never
from tandem.protocols import Algorithm
from tandem.spec.algorithm import AlgorithmSpec, DapoSpec, DrGrpoSpec, GrpoSpec, RlooSpec
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.types import Group, Trajectory

SPECS: TypeAdapter[Any] = TypeAdapter(AlgorithmSpec)
NO_FLOOR = 1e-9


pytestmark = pytest.mark.usefixtures("one_thread")


# --- which there are, and what each may be told


def test_every_algorithm_of_the_spec_is_built_under_its_own_name() -> None:
    kinds = [spec.model_fields["kind"].default for spec in typing.get_args(typing.get_args(AlgorithmSpec)[0])]
    assert kinds == [*MAKERS, "own"]
    for kind in MAKERS:
        teacher = {"teacher": "somewhere"} if kind == "distill" else {}
        assert training.algorithm(SPECS.validate_python({"kind": kind, **teacher}), MAX_TOKENS).name == kind


UNUSABLE = [
    ("dr_grpo", {"spread_floor": 0.1}),
    ("dr_grpo", {"ratio_cap": 2.0}),
    ("dr_grpo", {"dual_clip": 3.0}),
    ("rloo", {"baseline": "group"}),
    ("grpo", {"overlong_buffer": 3}),
    ("grpo", {"kl_estimator": "k1"}),  # with nothing to weigh it
    ("grpo", {"correction": {"kind": "none", "ratio_cap": 2.0}}),
    ("grpo", {"correction": {"kind": "truncate_token", "ratio_floor": 0.5}}),
    ("grpo", {"correction": {"kind": "truncate_sequence", "ratio_cap": 0.9}}),
    ("grpo", {"correction": {"kind": "mask_token", "ratio_floor": 1.0}}),
    ("gspo", {"correction": {"kind": "truncate_token"}}),
    ("cispo", {"correction": {"kind": "mask_token"}}),
    ("ppo", {"correction": {"kind": "truncate_sequence"}}),
    ("ppo", {"dual_clip": 1.0}),
    ("distill", {"teacher": "t", "kl_coef": 0.1}),
    ("distill", {"teacher": "t", "clip_low": 0.1}),
    ("distill", {"teacher": ""}),
    ("distill", {}),
]


@pytest.mark.parametrize(("kind", "knobs"), UNUSABLE, ids=str)
def test_a_knob_that_the_algorithm_cannot_use_is_refused(kind: str, knobs: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SPECS.validate_python({"kind": kind, **knobs})


# --- credits


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # mean 0.5
        (algorithm_of("dr_grpo"), [0.5, -0.5, 0.25, -0.25]),
        (algorithm_of("ppo"), [0.5, -0.5, 0.25, -0.25]),
        # spread sqrt((0.25 + 0.25 + 0.0625 + 0.0625) / 4) = 0.395285, and a floor of 0.1
        (algorithm_of("grpo", spread_floor=0.1), [1.009520, -1.009520, 0.504760, -0.504760]),
        (algorithm_of("dapo", spread_floor=0.1), [1.009520, -1.009520, 0.504760, -0.504760]),
        (algorithm_of("gspo", spread_floor=0.1), [1.009520, -1.009520, 0.504760, -0.504760]),
        (algorithm_of("cispo", spread_floor=0.1), [1.009520, -1.009520, 0.504760, -0.504760]),
        # the others' means: 1/3, 2/3, 5/12, 7/12
        (algorithm_of("rloo"), [2 / 3, -2 / 3, 1 / 3, -1 / 3]),
        # what rewards add to the teacher's word
        (algorithm_of("distill"), [0.0, 0.0, 0.0, 0.0]),
        (algorithm_of("distill", reward_coef=0.5), [0.25, -0.25, 0.125, -0.125]),
    ],
    ids=lambda value: value.name if isinstance(value, Algorithm) else "",
)
def test_credits_are_what_a_hand_computes(algorithm: Algorithm, expected: Sequence[float]) -> None:
    group = group_of((1.0, 2), (0.0, 1), (0.75, 4), (0.25, 3))
    other = group_of((7.0, 1), (1.0, 1))
    credit = algorithm.credit([group, other])[0]
    assert [len(tokens) for tokens in credit] == [2, 1, 4, 3]
    for tokens, value in zip(credit, expected, strict=True):
        assert tokens == pytest.approx([value] * len(tokens), abs=1e-6)


def test_rloo_compares_each_with_the_mean_of_the_others() -> None:
    rewards = [3.0, -1.0, 0.5]
    credit = rloo.make(RlooSpec()).credit([group_of(*((reward, 1) for reward in rewards))])[0]
    assert [tokens[0] for tokens in credit] == pytest.approx([3.0 - -0.25, -1.0 - 1.75, 0.5 - 1.0])


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        # mean 0.75, spread sqrt((3 * 0.0625 + 0.5625) / 4) = 0.433013
        ("none", [[0.577350, -1.732051], [0.577350, 0.577350]]),
        # after the groups' means 0.5 and 1: spread sqrt((0.25 + 0.25) / 4) = 0.353553
        ("group", [[1.414214, -1.414214], [0.0, 0.0]]),
    ],
)
def test_reinforce_pp_normalises_over_the_whole_step(baseline: str, expected: list[list[float]]) -> None:
    algorithm = algorithm_of("reinforce_pp", baseline=baseline, spread_floor=NO_FLOOR)
    groups = [group_of((1.0, 3), (0.0, 1)), group_of((1.0, 2), (1.0, 5))]
    found = algorithm.credit(groups)
    assert [[len(tokens) for tokens in group] for group in found] == [[3, 1], [2, 5]]
    for group, values in zip(found, expected, strict=True):
        assert [tokens[-1] for tokens in group] == pytest.approx(values, abs=1e-6)
    assert algorithm.credit([groups[1], groups[0]]) == [found[1], found[0]]
    assert algorithm.keep(groups[1]) == (baseline == "none")  # equal siblings are good or bad against the others
    assert algorithm.credit([groups[1]]) == [[[0.0] * 2, [0.0] * 5]]


@pytest.mark.parametrize("name", [name for name in FROM_REWARDS if name != "reinforce_pp"])
def test_a_group_of_equals_is_not_kept(name: str) -> None:
    algorithm = algorithm_of(name)
    equals = group_of((0.1, 2), (0.1, 3), (0.1, 1))
    assert not algorithm.keep(equals)
    assert algorithm.credit([equals]) == [[[0.0] * 2, [0.0] * 3, [0.0]]]
    assert not algorithm.keep(group_of((0.0, 0), (1.0, 0)))
    assert algorithm.keep(group_of((0.5, 2), (0.25, 3)))


def test_distillation_keeps_what_has_tokens_whatever_its_reward() -> None:
    keep = algorithm_of("distill").keep
    assert keep(group_of((0.5, 2), (0.5, 3)))
    assert not keep(group_of((0.0, 0), (1.0, 0)))


@pytest.mark.parametrize("name", FROM_REWARDS)
def test_the_credit_is_cut_where_it_is_larger_than_the_clip(name: str) -> None:
    groups = [group_of((1.0, 2), (0.0, 1), (0.52, 4), (0.5, 3))]
    plain = [tokens[0] for tokens in algorithm_of(name).credit(groups)[0]]
    cut = [tokens[0] for tokens in algorithm_of(name, advantage_clip=0.3).credit(groups)[0]]
    assert max(plain) > 0.3
    assert min(plain) < -0.3
    assert (cut[0], cut[1]) == (0.3, -0.3)
    assert cut[2:] == plain[2:]
    assert [tokens[0] for tokens in algorithm_of(name, advantage_clip=0.0).credit(groups)[0]] == plain


# --- DAPO's long answers


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (11, 0.0), (12, 0.0), (13, 0.25), (14, 0.5), (15, 0.75), (16, 1.0), (17, 1.0)]
)
def test_the_length_penalty_grows_over_the_last_tokens(length: int, penalty: float) -> None:
    (answer,) = group_of((1.0, length))
    assert dapo.overlong(answer, MAX_TOKENS, buffer=4) == penalty
    assert dapo.overlong(answer, MAX_TOKENS, buffer=0) == 0.0
    answer.status = "truncated"  # by the context, perhaps, long before
    assert dapo.overlong(answer, MAX_TOKENS, buffer=4) == 1.0
    assert dapo.overlong(answer, MAX_TOKENS, buffer=0) == 1.0


def test_the_limit_is_a_turn_s_and_so_is_the_length() -> None:
    (answer,) = group_of((1.0, 28))
    answer.trained[2 + 14] = False  # 14 tokens, the other's word, 13 tokens
    assert dapo.overlong(answer, MAX_TOKENS, buffer=4) == 0.5


def test_a_long_answer_is_worth_less_than_a_short_one() -> None:
    """1 - 1, 1 and 0: minus their mean 1/3, over their spread sqrt(2/9)."""
    algorithm = dapo.make(DapoSpec(overlong_buffer=4, spread_floor=NO_FLOOR), MAX_TOKENS)
    groups = [group_of((1.0, 16), (1.0, 2), (0.0, 2))]
    found = [tokens[0] for tokens in algorithm.credit(groups)[0]]
    assert found == pytest.approx([-0.707107, 1.414214, -0.707107], abs=1e-6)
    half = dapo.make(DapoSpec(overlong_buffer=4, overlong_penalty=0.5, spread_floor=NO_FLOOR), MAX_TOKENS)
    assert half.credit(groups)[0][0] == pytest.approx([0.0] * 16)  # 0.5 is the mean of 0.5, 1 and 0
    none = dapo.make(DapoSpec(overlong_buffer=4, overlong_penalty=0.0, spread_floor=NO_FLOOR), MAX_TOKENS)
    assert none.credit(groups)[0][0] == none.credit(groups)[0][1][:1] * 16


def test_length_alone_is_nothing_to_learn_from() -> None:
    """Otherwise the spread, which here is of lengths, would make a small penalty as large as a reward."""
    algorithm = dapo.make(DapoSpec(overlong_buffer=4), MAX_TOKENS)
    groups = [group_of((0.0, 13), (0.0, 2))]
    assert not algorithm.keep(groups[0])
    assert algorithm.credit(groups) == [[[0.0] * 13, [0.0] * 2]]


# --- shaping: what counts between different rewards, and never makes the difference


def shaped_group_of(*samples: tuple[float, float]) -> Group:
    """(reward, shaping) of each sibling."""
    group = group_of(*((reward, 2) for reward, _ in samples))
    for trajectory, (_, shaping) in zip(group, samples, strict=True):
        trajectory.shaping = shaping
    return group


@pytest.mark.parametrize("name", FROM_REWARDS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_siblings_that_differ_in_shaping_alone_have_no_credit(name: str, reward: float) -> None:
    algorithm = algorithm_of(name)
    group = shaped_group_of((reward, -0.001), (reward, -0.008), (reward, 0.0))
    assert algorithm.keep(group) == (name == "reinforce_pp")  # which has other groups to compare it with
    assert algorithm.credit([group, group]) == [[[0.0] * 2] * 3] * 2
    assert algorithm_of("distill", reward_coef=2.0).credit([group]) == [[[0.0] * 2] * 3]


# Worth 0.9, 0.2 and 0.1: minus their mean 0.4, over their spread sqrt((0.25 + 0.04 + 0.09) / 3).
SPREAD = 0.355903


@pytest.mark.parametrize(
    ("name", "spec", "scale"),
    [
        ("dr_grpo", {}, 1.0),
        ("ppo", {}, 1.0),
        ("rloo", {}, 3 / 2),
        ("grpo", {"spread_floor": NO_FLOOR}, 1 / SPREAD),
        ("dapo", {"spread_floor": NO_FLOOR}, 1 / SPREAD),
        ("gspo", {"spread_floor": NO_FLOOR}, 1 / SPREAD),
        ("cispo", {"spread_floor": NO_FLOOR}, 1 / SPREAD),
        ("reinforce_pp", {"spread_floor": NO_FLOOR}, 1 / SPREAD),
        ("reinforce_pp", {"spread_floor": NO_FLOOR, "baseline": "group"}, 1 / SPREAD),
        ("distill", {"reward_coef": 0.5}, 0.5),
    ],
    ids=str,
)
def test_between_different_rewards_shaping_counts_in_full(name: str, spec: dict[str, Any], scale: float) -> None:
    algorithm = algorithm_of(name, **spec)
    group = shaped_group_of((1.0, -0.1), (0.25, -0.05), (0.25, -0.15))
    assert algorithm.keep(group)
    found = [tokens[0] for tokens in algorithm.credit([group])[0]]
    assert found == pytest.approx([0.5 * scale, -0.2 * scale, -0.3 * scale], rel=1e-5)


def test_dapo_adds_its_own_shaping() -> None:
    """1 - 0.5 - 0.5, 1 - 0.25 and 0: minus their mean 1/4, over their spread sqrt(1/8)."""
    algorithm = algorithm_of("dapo", overlong_buffer=4, overlong_penalty=0.5, spread_floor=NO_FLOOR)
    group = group_of((1.0, 16), (1.0, 2), (0.0, 2))
    group[0].shaping, group[1].shaping = -0.5, -0.25
    found = [tokens[0] for tokens in algorithm.credit([group])[0]]
    assert found == pytest.approx([-0.707107, 1.414214, -0.707107], abs=1e-6)


def test_without_a_baseline_siblings_are_compared_with_all_of_the_step() -> None:
    """Worth 0, -0.5, 1 and 0.5: minus their mean 0.25, over their spread sqrt(0.3125)."""
    algorithm = algorithm_of("reinforce_pp", spread_floor=NO_FLOOR)
    groups = [shaped_group_of((0.0, 0.0), (0.0, -0.5)), shaped_group_of((1.0, 0.0), (1.0, -0.5))]
    found = [tokens[0] for credit in algorithm.credit(groups) for tokens in credit]
    assert found == pytest.approx([-0.447214, -1.341641, 1.341641, 0.447214], abs=1e-6)
    by_siblings = algorithm_of("reinforce_pp", baseline="group")
    assert by_siblings.credit(groups) == [[[0.0] * 2] * 2] * 2


# --- how tokens are averaged


def gradient_by_length(algorithm: Algorithm, groups: Sequence[Group]) -> dict[int, float]:
    """Gradient of the loss at each token, by the number of trained tokens of its sequence."""
    batch = make_batch(groups, algorithm, micro_tokens=10**6, version=0, shares=shares_never, device=CPU)
    (micro,) = batch.micro
    given = scored(micro.behaviour_N)
    loss, _ = algorithm.loss(given, micro, batch.totals)
    (gradient_N,) = torch.autograd.grad(loss, given.logprobs_N)
    return dict(zip(micro.length_N.int().tolist(), gradient_N.tolist(), strict=True))


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "dapo", "cispo", "reinforce_pp", "ppo"])
def test_every_token_counts_alike(name: str) -> None:
    """Credits +A and -A over 1 + 4 tokens. A is 0.5; 1 where it is divided by the spread, or scaled by 2 / (2 - 1)."""
    floor = {} if name in ("dr_grpo", "rloo", "ppo") else {"spread_floor": NO_FLOOR}
    found = gradient_by_length(algorithm_of(name, **floor), [group_of((1.0, 1), (0.0, 4))])
    credit = 0.5 if name in ("dr_grpo", "ppo") else 1.0
    assert found == pytest.approx({1: -credit / 5, 4: credit / 5}, rel=1e-6)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_every_sequence_counts_alike(name: str) -> None:
    """Credits +1 and -1 (spread 0.5, floor negligible), a half for each sequence, split over its own tokens."""
    found = gradient_by_length(algorithm_of(name, spread_floor=NO_FLOOR), [group_of((1.0, 1), (0.0, 4))])
    assert found == pytest.approx({1: -1 / 2, 4: 1 / (2 * 4)}, rel=1e-6)


def test_tokens_of_all_groups_share_one_average() -> None:
    groups = [group_of((1.0, 1), (0.0, 4)), group_of((1.0, 2), (0.0, 3))]
    found = gradient_by_length(dr_grpo.make(DrGrpoSpec()), groups)
    assert found == pytest.approx({1: -0.05, 4: 0.05, 2: -0.05, 3: 0.05})
    found = gradient_by_length(grpo.make(GrpoSpec(spread_floor=1e-9)), groups)
    assert found == pytest.approx({1: -1 / 4, 4: 1 / 16, 2: -1 / 8, 3: 1 / 12}, rel=1e-6)


def test_sft_is_the_mean_negative_logprob() -> None:
    algorithm, group = sft.make(), group_of((0.0, 1), (0.0, 4))
    batch = make_batch([group], algorithm, micro_tokens=100, version=0, shares=shares_never, device=CPU)
    given = scored(batch.micro[0].behaviour_N)
    loss, _ = algorithm.loss(given, batch.micro[0], batch.totals)
    assert loss.item() == pytest.approx((1.0 + 1.0 + 1.25 + 1.5 + 1.75) / 5)
    assert torch.autograd.grad(loss, given.logprobs_N)[0].tolist() == pytest.approx([-0.2] * 5)


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
    batch = make_batch([group], algorithm, micro_tokens=10**6, version=0, shares=shares_never, device=CPU)
    loss, metrics = algorithm.loss(policy.logprobs(batch.micro[0], 1.0), batch.micro[0], batch.totals)
    assert metrics["loss/ratio_mean"] / batch.totals.tokens == pytest.approx(1.0, abs=1e-5)
    credit = [tokens[0] for tokens in algorithm.credit([group])[0]]
    sums = [a * naive_logprobs(policy, t).sum() for a, t in zip(credit, group, strict=True)]
    reinforce = -torch.stack(sums).sum() / 15
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
    batch = make_batch([group], algorithm, micro_tokens=10**6, version=0, shares=shares_never, device=CPU)
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
