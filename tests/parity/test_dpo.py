"""DPO against numbers worked out by hand, against one plain forward a sequence, and in every way a step can be cut."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tandem.algo import dpo
from tandem.model.policy import CausalPolicy
from tandem.ops.byte_sizes import Shares, shares_never, shares_unmasked
from tandem.optim.adamw import AdamW
from tandem.optim.master_weights import Float32
from tandem.optim.optimizer import Optimizer
from tandem.protocols import Algorithm
from tandem.spec.model import LoraSpec
from tandem.spec.optim import AdamWSpec
from tandem.spec.preference import DpoSpec
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.train.trainer import PolicyTrainer
from tandem.types import NO_VERSION, Batch, Group, MicroBatch, PackedRows, TokenLogprobs, Totals, Trajectory

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


# --- two pairs by hand

# Logprobs of each token under the policy and under the reference. Sequences stand in no order, groups have any number.
SEQUENCES = [
    # group, credit, policy, reference
    (7, -1.0, [-1.0, -1.0, -1.0], [-2.0, -1.0, -3.0]),  # rejected: gained 3
    (3, +1.0, [-1.0, -2.0], [-1.5, -2.5]),  # chosen: gained 1
    (3, -1.0, [-3.0], [-2.0]),  # rejected: lost 1
    (7, +1.0, [-1.0], [-1.0]),  # chosen: gained nothing
]
GAIN_3, GAIN_7 = 2.0, -3.0
TOTALS = Totals(tokens=7, sequences=4)
PAIR_OF_TOKEN = [7, 7, 7, 3, 3, 3, 7]
SIGN_OF_TOKEN = [-1, -1, -1, 1, 1, -1, 1]
LENGTH_OF_TOKEN = [3, 3, 3, 2, 2, 1, 1]


def micro_of(sequences: Sequence[tuple[int, float, list[float], list[float]]]) -> tuple[TokenLogprobs, MicroBatch]:
    lengths = torch.tensor([len(policy) for _, _, policy, _ in sequences])
    sequence_N = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    logprobs_N = torch.tensor([value for _, _, policy, _ in sequences for value in policy], dtype=torch.float64)
    reference_N = torch.tensor([value for _, _, _, reference in sequences for value in reference], dtype=torch.float64)
    credit_S = torch.tensor([credit for _, credit, _, _ in sequences], dtype=torch.float64)
    nothing = torch.zeros(0, dtype=torch.long)
    unpacked = PackedRows((nothing, nothing, 0, 0, None), nothing, nothing)
    micro = MicroBatch(
        nothing, nothing, nothing, nothing, unpacked, nothing, nothing,
        credit_S[sequence_N], torch.zeros_like(logprobs_N),
        torch.full_like(sequence_N, NO_VERSION), lengths.double()[sequence_N], sequence_N,
        torch.tensor([group for group, _, _, _ in sequences]), reference_N,
    )  # fmt: skip
    logprobs_N.requires_grad_()
    return TokenLogprobs(logprobs_N, torch.ones_like(logprobs_N).detach()), micro


def loss_and_gradient(
    sequences: Sequence[tuple[int, float, list[float], list[float]]] = SEQUENCES, **spec: Any
) -> tuple[float, list[float]]:
    scored, micro = micro_of(sequences)
    loss, _ = dpo.make(DpoSpec(**spec)).loss(scored, micro, TOTALS)
    (gradient_N,) = torch.autograd.grad(loss, scored.logprobs_N)
    return loss.item(), gradient_N.tolist()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_pair(of_3: float, of_7: float) -> list[float]:
    return [of_3 if pair == 3 else of_7 for pair in PAIR_OF_TOKEN]


def test_two_pairs_by_hand() -> None:
    loss, gradient = loss_and_gradient(beta=0.5)
    # Margins 1 and -1.5: log(1 + e^-1) = 0.3132617 and log(1 + e^1.5) = 1.7014133.
    assert loss == pytest.approx((0.3132617 + 1.7014133) / 2, abs=1e-7)
    # -beta * sigmoid(-margin) / 2 pairs for a chosen token, the opposite for a rejected one.
    push = by_pair(0.5 * 0.2689414 / 2, 0.5 * 0.8175745 / 2)
    assert gradient == pytest.approx([-sign * size for sign, size in zip(SIGN_OF_TOKEN, push, strict=True)], abs=1e-7)


def test_where_the_policy_is_the_reference_the_loss_is_log_2_and_all_tokens_are_pushed_alike() -> None:
    same = [(group, credit, reference, reference) for group, credit, _, reference in SEQUENCES]
    for smoothing in (0.0, 0.2):
        loss, gradient = loss_and_gradient(same, beta=0.3, label_smoothing=smoothing)
        assert loss == pytest.approx(math.log(2), abs=1e-12)
        size = 0.3 * (0.5 - smoothing) / 2
        assert gradient == pytest.approx([-sign * size for sign in SIGN_OF_TOKEN], abs=1e-12)


def test_swapped_answers_flip_every_sign() -> None:
    swapped = [(group, -credit, policy, reference) for group, credit, policy, reference in SEQUENCES]
    loss, gradient = loss_and_gradient(swapped, beta=0.5)
    # -log sigmoid(-z) = -log sigmoid(z) + z: the mean margin is (1 - 1.5) / 2.
    assert loss == pytest.approx(loss_and_gradient(beta=0.5)[0] + (1.0 - 1.5) / 2, abs=1e-12)
    push = by_pair(0.5 * sigmoid(1.0) / 2, 0.5 * sigmoid(-1.5) / 2)
    assert gradient == pytest.approx([sign * size for sign, size in zip(SIGN_OF_TOKEN, push, strict=True)], abs=1e-12)


def test_label_smoothing_mixes_both_directions_and_is_content_at_a_finite_margin() -> None:
    loss, gradient = loss_and_gradient(beta=0.5, label_smoothing=0.1)
    by_hand = [-0.9 * math.log(sigmoid(z)) - 0.1 * math.log(sigmoid(-z)) for z in (1.0, -1.5)]
    assert loss == pytest.approx(sum(by_hand) / 2, abs=1e-12)
    push = by_pair(*(0.5 * (0.9 * sigmoid(-z) - 0.1 * sigmoid(z)) / 2 for z in (1.0, -1.5)))
    assert gradient == pytest.approx([-sign * size for sign, size in zip(SIGN_OF_TOKEN, push, strict=True)], abs=1e-12)
    content = math.log(0.9 / 0.1)  # the margin of a pair that is right nine times out of ten
    at_rest = [(1, 1.0, [content], [0.0]), (1, -1.0, [0.0], [0.0])]
    assert loss_and_gradient(at_rest, beta=1.0, label_smoothing=0.1)[1] == pytest.approx([0, 0], abs=1e-12)


def test_length_normalisation_takes_the_mean_of_each_answer() -> None:
    loss, gradient = loss_and_gradient(beta=2.0, length_normalised=True)
    margins = 2.0 * (1 / 2 - (-1) / 1), 2.0 * (0 - 3 / 3)
    assert loss == pytest.approx(sum(-math.log(sigmoid(z)) for z in margins) / 2, abs=1e-12)
    push = by_pair(*(2.0 * sigmoid(-z) / 2 for z in margins))
    expected = [-s * p / n for s, p, n in zip(SIGN_OF_TOKEN, push, LENGTH_OF_TOKEN, strict=True)]
    assert gradient == pytest.approx(expected, abs=1e-12)


def test_the_imitation_term_is_the_chosen_answer_s_loss_a_token() -> None:
    plain, plain_gradient = loss_and_gradient(beta=0.5)
    loss, gradient = loss_and_gradient(beta=0.5, sft_coef=0.25)
    assert loss - plain == pytest.approx(0.25 * (1.5 + 1.0) / 2, abs=1e-12)  # -(-1 - 2) / 2 and -(-1)
    added = [after - before for after, before in zip(gradient, plain_gradient, strict=True)]
    # Chosen tokens only: of the answer with two, and of the one with one.
    assert added == pytest.approx([0, 0, 0, -0.25 / 2 / 2, -0.25 / 2 / 2, 0, -0.25 / 2], abs=1e-12)


def test_metrics_are_means_over_pairs_once_divided_by_the_step_s_tokens() -> None:
    scored, micro = micro_of(SEQUENCES)
    _, sums = dpo.make(DpoSpec(beta=0.5)).loss(scored, micro, TOTALS)
    assert {name: value.item() / TOTALS.tokens for name, value in sums.items()} == pytest.approx(
        {
            "reward/margin": (1.0 - 1.5) / 2,
            "reward/accuracy": 0.5,
            "reward/chosen": 0.5 * (1 + 0) / 2,
            "reward/rejected": 0.5 * (-1 + 3) / 2,
            "logprob/chosen": (-3.0 - 1.0) / 2,
            "logprob/rejected": (-3.0 - 3.0) / 2,
            "policy/entropy": 1.0,
        }
    )


def test_a_tie_counts_as_half_right() -> None:
    same = [(group, credit, reference, reference) for group, credit, _, reference in SEQUENCES]
    scored, micro = micro_of(same)
    _, sums = dpo.make(DpoSpec()).loss(scored, micro, TOTALS)
    assert sums["reward/accuracy"].item() / TOTALS.tokens == 0.5


def test_margins_beyond_all_bounds_keep_loss_and_gradient_finite() -> None:
    far = [(1, 1.0, [-9000.0], [0.0]), (1, -1.0, [0.0], [-9000.0]), (2, 1.0, [0.0], [-9000.0]), (2, -1.0, [0.0], [0.0])]
    loss, gradient = loss_and_gradient(far, beta=1.0, label_smoothing=0.1)
    assert loss == pytest.approx((0.9 * 18000 + 0.1 * 9000) / 2)
    assert gradient == pytest.approx([-0.45, 0.45, 0.05, -0.05])


# --- what is no pair


def recording(prompt: Sequence[int], answer: Sequence[int], reward: float) -> Trajectory:
    ids, trained = [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
    return Trajectory(ids, trained, [0.0] * len(ids), [NO_VERSION] * len(ids), reward, "recorded")


def test_a_missing_reference_is_refused() -> None:
    scored, micro = micro_of(SEQUENCES)
    micro.reference_N = None
    with pytest.raises(AssertionError, match="the reference's logprobs are missing"):
        dpo.make(DpoSpec()).loss(scored, micro, TOTALS)


def test_half_a_pair_is_refused() -> None:
    scored, micro = micro_of(SEQUENCES[:3])
    with pytest.raises(AssertionError, match="split over two micro-batches"):
        dpo.make(DpoSpec()).loss(scored, micro, TOTALS)


@pytest.mark.parametrize("rewards", [(1.0,), (1.0, 1.0), (1.0, 0.0, 0.0)])
def test_a_group_that_is_no_pair_is_not_kept_and_has_no_credit(rewards: tuple[float, ...]) -> None:
    algorithm, group = dpo.make(DpoSpec()), [recording([1], [2], reward) for reward in rewards]
    assert not algorithm.keep(group)
    with pytest.raises(AssertionError, match="two answers, one of them better"):
        algorithm.credit([group])


def test_the_better_answer_is_told_by_its_reward_wherever_it_stands() -> None:
    algorithm = dpo.make(DpoSpec())
    pair = [recording([1], [2, 3], 0.0), recording([1], [4], 1.0)]
    assert algorithm.keep(pair)
    assert algorithm.credit([pair, pair[::-1]]) == [[[-1.0, -1.0], [1.0]], [[1.0], [-1.0, -1.0]]]


# --- a policy: packed, as trees, cut into micro-batches

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}


def policy_of(lora: LoraSpec | None = None) -> CausalPolicy:
    tokenizer = byte_tokenizer()
    special: Any = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "attn_implementation": "sdpa"}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.2, **SIZES, **special)
    torch.manual_seed(0)
    return CausalPolicy(transformers.LlamaForCausalLM(config), tokenizer, lora=lora)


POLICIES: dict[str, Callable[[], CausalPolicy]] = {"full": policy_of, "lora": lambda: policy_of(LoraSpec(rank=4))}


def moved_policy(name: str) -> CausalPolicy:
    """Some way from its reference."""
    policy = POLICIES[name]()
    policy.keep_reference()
    with torch.no_grad():
        for _, tensor in policy.trainable():
            tensor.add_(torch.randn_like(tensor), alpha=0.05)
    return policy


def random_pairs(seed: int, count: int = 6, shortest_answer: int = 1, longest_prompt: int = 20) -> list[Group]:
    rng = random.Random(seed)

    def some(least: int, most: int) -> list[int]:
        return [rng.randrange(256) for _ in range(rng.randint(least, most))]

    pairs = []
    for _ in range(count):
        prompt = some(2, longest_prompt)
        answers = some(shortest_answer, 12), some(shortest_answer, 12)
        pair = [recording(prompt, answer, reward) for answer, reward in zip(answers, (1.0, 0.0), strict=True)]
        pairs.append(pair[:: rng.choice([1, -1])])
    return pairs


def batch_of(pairs: list[Group], algorithm: Algorithm, micro_tokens: int, shares: Shares) -> Batch:
    return make_batch(
        pairs, algorithm, micro_tokens=micro_tokens, version=0, shares=shares, device=CPU
    )  # fmt: skip


def gradients(policy: CausalPolicy, loss: Tensor) -> dict[str, Tensor]:
    names, tensors = zip(*policy.trainable(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, tensors), strict=True))


def one_by_one(policy: CausalPolicy, pairs: list[Group], spec: DpoSpec) -> tuple[float, dict[str, Tensor]]:
    """The formula as it stands in the paper, on the model's own forward of each answer alone."""

    def answer(trajectory: Trajectory) -> Tensor:
        ids_T = torch.tensor(trajectory.ids)
        logprobs_TV = policy.module(input_ids=ids_T[None]).logits[0, :-1].log_softmax(-1)
        return logprobs_TV.gather(-1, ids_T[1:, None]).squeeze(-1)[torch.tensor(trajectory.trained[1:])]

    reference = POLICIES["full"]()  # made with the same seed: what every policy here began as
    total = torch.zeros(())
    for pair in pairs:
        chosen, rejected = sorted(pair, key=lambda trajectory: -trajectory.reward)
        ratios, policy_chosen = [], answer(chosen)
        for trajectory in (chosen, rejected):
            log_pi = answer(trajectory)
            policy_module, policy.module = policy.module, reference.module
            log_ref = answer(trajectory).detach()
            policy.module = policy_module
            ratio_T = log_pi - log_ref
            ratios.append(ratio_T.mean() if spec.length_normalised else ratio_T.sum())
        right = torch.sigmoid(spec.beta * (ratios[0] - ratios[1]))
        total = total - (1 - spec.label_smoothing) * right.log() - spec.label_smoothing * (1 - right).log()
        total = total - spec.sft_coef * policy_chosen.mean()
    loss = total / len(pairs)
    return loss.item(), gradients(policy, loss)


SPECS = {
    "plain": DpoSpec(),
    "smoothed": DpoSpec(beta=0.3, label_smoothing=0.1),
    "normalised": DpoSpec(beta=2.0, length_normalised=True),
    "imitating": DpoSpec(sft_coef=0.5),
}


@pytest.mark.parametrize("options", SPECS)
@pytest.mark.parametrize("name", POLICIES)
def test_loss_and_gradient_are_those_of_the_formula_however_the_step_is_cut(name: str, options: str) -> None:
    policy, spec = moved_policy(name), SPECS[options]
    pairs = random_pairs(1, shortest_answer=8, longest_prompt=3)  # by themselves too short a prompt to be worth a tree
    algorithm = dpo.make(spec)
    expected, expected_gradients = one_by_one(policy, pairs, spec)
    largest = max(1.0, *(gradient.abs().max().item() for gradient in expected_gradients.values()))
    forms: set[tuple[bool, bool]] = set()
    for micro_tokens in (16, 60, 10**6):
        for shares in (shares_never, shares_unmasked):
            batch = batch_of(pairs, algorithm, micro_tokens, shares)
            forms.add((len(batch.micro) > 1, batch.metrics["tokens/shared"] > 0))
            loss = torch.zeros(())
            for micro in batch.micro:
                micro.reference_N = policy.reference_logprobs(micro, 1.0)
                loss = loss + algorithm.loss(policy.logprobs(micro, 1.0), micro, batch.totals)[0]
            assert loss.item() == pytest.approx(expected, abs=1e-5)
            for key, gradient in gradients(policy, loss).items():
                assert (gradient - expected_gradients[key]).abs().max().item() < 1e-5 * largest
    assert forms == {(cut, shared) for cut in (False, True) for shared in (False, True)}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_has_not_moved_is_its_reference_to_the_bit(name: str) -> None:
    policy, algorithm = POLICIES[name](), dpo.make(DpoSpec())
    policy.keep_reference()
    batch = batch_of(random_pairs(2), algorithm, 10**6, shares_unmasked)
    (micro,) = batch.micro
    micro.reference_N = policy.reference_logprobs(micro, 1.0)
    loss, sums = algorithm.loss(policy.logprobs(micro, 1.0), micro, batch.totals)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert (sums["reward/margin"].item(), sums["reward/accuracy"].item() / batch.totals.tokens) == (0.0, 0.5)
    # Rejected answers count against, chosen ones for: the closed form, carried back through the model.
    sign_N = micro.credit_N
    closed = -(0.1 / 2 / len(random_pairs(2))) * (sign_N * policy.logprobs(micro, 1.0).logprobs_N).sum()
    expected = gradients(policy, closed)
    for key, gradient in gradients(policy, loss).items():
        assert torch.allclose(gradient, expected[key], atol=1e-6)


def test_adapters_need_no_second_copy_of_the_base() -> None:
    policies = {name: make() for name, make in POLICIES.items()}
    for policy in policies.values():
        policy.keep_reference()
    copied = {name: policy.reference_bytes() > 0 for name, policy in policies.items()}
    assert copied == {"full": True, "lora": False}


# --- in a trainer


def trainer_of(policy: CausalPolicy, algorithm: Algorithm) -> PolicyTrainer:
    named, rule = policy.trainable(), AdamW(AdamWSpec())
    optimizer = Optimizer(named, {name: rule for name, _ in named}, Float32(), weight_decay=0.0)
    return PolicyTrainer(policy, algorithm, optimizer, lr=lambda _: 1e-3, clip_norm=1.0)


def test_a_trainer_s_metrics_do_not_depend_on_how_the_step_is_cut() -> None:
    found, algorithm = [], dpo.make(DpoSpec(beta=0.5))
    for micro_tokens in (16, 60, 10**6):
        batch = batch_of(random_pairs(3), algorithm, micro_tokens, shares_never)
        metrics = trainer_of(moved_policy("full"), algorithm).step(batch)
        found.append({key: metrics[key] for key in metrics if key.startswith(("reward/", "logprob/", "loss/"))})
    assert set(found[0]) == {"loss/total", "reward/margin", "reward/accuracy", "reward/chosen", "reward/rejected",
                             "logprob/chosen", "logprob/rejected"}  # fmt: skip
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-4)


def test_steps_widen_the_margin_of_the_pairs_whichever_answer_is_called_the_better() -> None:
    def margin_after(pairs: list[Group]) -> float:
        policy = policy_of()
        policy.keep_reference()
        algorithm = dpo.make(DpoSpec(beta=0.5))
        trainer = trainer_of(policy, algorithm)
        for _ in range(5):
            trainer.step(batch_of(pairs, algorithm, 10**6, shares_unmasked))
        return trainer.step(batch_of(pairs, algorithm, 10**6, shares_unmasked))["reward/margin"]

    straight, swapped = random_pairs(4), random_pairs(4)
    for pair in swapped:
        for trajectory in pair:
            trajectory.reward = 1 - trajectory.reward
    assert margin_after(straight) > 0.5
    assert margin_after(swapped) > 0.5


def test_label_noise_bounds_what_is_learned() -> None:
    """Trained for long, the margin ends near log(0.8 / 0.2), where label smoothing is content."""
    policy, pairs = policy_of(), random_pairs(5, 2)
    policy.keep_reference()
    algorithm = dpo.make(DpoSpec(beta=0.5, label_smoothing=0.2))
    trainer = trainer_of(policy, algorithm)
    margins = [trainer.step(batch_of(pairs, algorithm, 10**6, shares_unmasked))["reward/margin"] for _ in range(60)]
    assert margins[-1] == pytest.approx(math.log(0.8 / 0.2), abs=0.1)
