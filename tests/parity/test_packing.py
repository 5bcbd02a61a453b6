"""Packed rows, shared prompts and micro-batches against one plain forward a sequence."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tandem.algo import dr_grpo, grpo, rloo
from tandem.model.policy import CausalPolicy
from tandem.ops.byte_sizes import Shares, shares_masked, shares_never, shares_unmasked
from tandem.protocols import Algorithm
from tandem.spec.algorithm import DrGrpoSpec, GrpoSpec, RlooSpec
from tandem.spec.model import LoraSpec
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.types import UNKNOWN_VERSION, Batch, Group, Metrics, MicroBatch, TokenLogprobs, Totals, Trajectory

CPU = torch.device("cpu")
TOKENIZER = byte_tokenizer()


pytestmark = pytest.mark.usefixtures("one_thread")


# --- policies


def tiny(config: type, model: type, attention: str = "sdpa", **sizes: Any) -> Any:
    shape = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"max_position_embeddings": 128, "initializer_range": 0.2, "attn_implementation": attention}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "dtype": "float32"}
    torch.manual_seed(0)
    return model(config(**shape, **more, **special, **sizes))


GQA = {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48}


def llama() -> Any:
    return tiny(transformers.LlamaConfig, transformers.LlamaForCausalLM, **GQA)


def with_adapters() -> CausalPolicy:
    policy = CausalPolicy(llama(), TOKENIZER, lora=LoraSpec(rank=4))
    with torch.no_grad():
        for _, tensor in policy.trainable():
            tensor.normal_(std=0.2)
    return policy


POLICIES: dict[str, Callable[[], CausalPolicy]] = {
    "llama": lambda: CausalPolicy(llama(), TOKENIZER),
    "lora": with_adapters,
    "sliding": lambda: CausalPolicy(
        tiny(transformers.MistralConfig, transformers.MistralForCausalLM, sliding_window=6, **GQA), TOKENIZER
    ),
    "mixed-eager": lambda: CausalPolicy(
        tiny(transformers.Gemma2Config, transformers.Gemma2ForCausalLM, "eager", sliding_window=6, **GQA), TOKENIZER
    ),
    "learned-positions": lambda: CausalPolicy(tiny(transformers.GPT2Config, transformers.GPT2LMHeadModel), TOKENIZER),
}


# --- groups: every token carries a version of its own, by which it is found again after packing


class Writer:
    def __init__(self, seed: int) -> None:
        self.rng, self.tokens = random.Random(seed), 0

    def trajectory(self, prompt: Sequence[int], turns: Sequence[tuple[int, int]]) -> Trajectory:
        """`turns`: how many tokens of glue, then how many the policy spoke."""
        ids, trained = list(prompt), [False] * len(prompt)
        for glue, spoken in turns:
            ids += self.some(glue + spoken)
            trained += [False] * glue + [True] * spoken
        versions = list(range(self.tokens, self.tokens + len(ids)))
        self.tokens += len(ids)
        logprobs = [self.rng.uniform(-4, -3) if t else 0.0 for t in trained]
        return Trajectory(ids, trained, logprobs, versions, reward=self.rng.random(), task_id=f"t{self.tokens}")

    def some(self, count: int) -> list[int]:
        return [self.rng.randrange(256) for _ in range(count)]

    def group(self) -> Group:
        """Siblings of one prompt: one to three turns each, of unequal length; some answer after glue of their own."""
        prompt = self.some(self.rng.randint(1, 20))
        return [
            self.trajectory(
                prompt,
                [(self.rng.choice([0, 0, 3]), self.rng.randint(1, 9))]
                + [(self.rng.randint(1, 4), self.rng.randint(1, 9)) for _ in range(self.rng.randint(0, 2))],
            )
            for _ in range(self.rng.randint(1, 5))
        ]


def random_groups(seed: int, count: int = 4) -> list[Group]:
    writer = Writer(seed)
    return [writer.group() for _ in range(count)]


def weight_of(version: int) -> float:
    return random.Random(version).uniform(-1, 1)


def weighted() -> Algorithm:
    """Each token has a weight of its own, so that no two can be mistaken for each other."""

    def credit(groups: Sequence[Group]) -> list[list[list[float]]]:
        return [
            [[weight_of(v) for v, t in zip(t.versions, t.trained, strict=True) if t] for t in group] for group in groups
        ]

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        return -(scored.logprobs_N * micro.credit_N).sum() / totals.tokens, {}

    return Algorithm("weighted", lambda group: True, credit, loss)


# --- the two ways


@dataclass
class Result:
    loss: float
    logprobs: dict[int, float]
    """By the token's version."""
    gradients: dict[str, Tensor]
    metrics: Metrics

    def distance(self, other: Result) -> float:
        assert self.logprobs.keys() == other.logprobs.keys()
        assert self.gradients.keys() == other.gradients.keys()
        largest = max(tensor.abs().max().item() for tensor in other.gradients.values())
        gradients = max((self.gradients[name] - other.gradients[name]).abs().max().item() for name in other.gradients)
        logprobs = max(abs(value - other.logprobs[token]) for token, value in self.logprobs.items())
        return max(logprobs, gradients / max(1.0, largest), abs(self.loss - other.loss))


def gradients(policy: CausalPolicy, loss: Tensor) -> dict[str, Tensor]:
    names, tensors = zip(*policy.trainable(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, tensors), strict=True))


def packed(
    policy: CausalPolicy,
    groups: Sequence[Group],
    algorithm: Algorithm,
    *,
    micro_tokens: int = 10**6,
    shares: Shares = shares_never,
) -> Result:
    batch = make_batch(
        groups, algorithm, micro_tokens=micro_tokens, version=0, shares=shares, device=CPU
    )  # fmt: skip
    loss, logprobs = torch.zeros(()), {}
    for micro in batch.micro:
        if algorithm.needs_reference:
            micro.reference_N = policy.reference_logprobs(micro, 1.0)
        scored = policy.logprobs(micro, 1.0)
        loss = loss + algorithm.loss(scored, micro, batch.totals)[0]
        logprobs |= dict(zip(micro.versions_N.tolist(), scored.logprobs_N.tolist(), strict=True))
    return Result(loss.item(), logprobs, gradients(policy, loss), batch.metrics)


def one_by_one(policy: CausalPolicy, groups: Sequence[Group]) -> Result:
    """The model's own forward over each trajectory alone; nothing of ours but the weights of tokens."""
    total, count, logprobs = torch.zeros(()), 0, {}
    for trajectory in (trajectory for group in groups for trajectory in group):
        ids_T = torch.tensor(trajectory.ids)
        logprobs_TV = policy.module(input_ids=ids_T[None]).logits[0, :-1].log_softmax(-1)
        logprobs_T = logprobs_TV.gather(-1, ids_T[1:, None]).squeeze(-1)
        for offset, trained in enumerate(trajectory.trained):
            if trained:
                version = trajectory.versions[offset]
                logprobs[version] = logprobs_T[offset - 1].item()
                total = total - logprobs_T[offset - 1] * weight_of(version)
                count += 1
    return Result((total / count).item(), logprobs, gradients(policy, total / count), {})


# --- packed equals unpacked


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("shares", [shares_never, shares_unmasked])
def test_packed_equals_unpacked(name: str, shares: Shares) -> None:
    policy = POLICIES[name]()
    for seed in range(4):
        groups = random_groups(seed)
        result = packed(policy, groups, weighted(), shares=shares)
        assert result.distance(one_by_one(policy, groups)) < 1e-5
        assert (result.metrics["tokens/shared"] > 0) == (shares == shares_unmasked)


@pytest.mark.parametrize("seed", range(12))
def test_random_groups_are_the_same_in_any_packing(seed: int) -> None:
    policy, groups = POLICIES["llama"](), random_groups(100 + seed)
    expected = one_by_one(policy, groups)
    for micro_tokens in (16, 70, 300):
        for shares in (shares_never, shares_masked(32), shares_unmasked):
            result = packed(policy, groups, weighted(), micro_tokens=micro_tokens, shares=shares)
            assert result.distance(expected) < 1e-5


def test_rows_of_one_sequence_equal_rows_of_many() -> None:
    """The path without a mask, padding included, and the path with one."""
    policy, writer = POLICIES["llama"](), Writer(5)
    long = [writer.trajectory(writer.some(20), [(0, 20 - i)]) for i in range(4)]
    short = [writer.trajectory(writer.some(4), [(0, 3)]) for _ in range(3)]
    without = packed(policy, [long], weighted())
    assert without.distance(one_by_one(policy, [long])) < 1e-5
    everything = packed(policy, [long, short], weighted())
    assert everything.distance(one_by_one(policy, [long, short])) < 1e-5
    assert everything.metrics["tokens/computed"] == sum(len(t.ids) for t in [*long, *short])


def test_siblings_that_part_before_they_speak_share_what_they_have() -> None:
    policy, writer = POLICIES["llama"](), Writer(6)
    opening = writer.some(9)
    group = [writer.trajectory([*opening, *writer.some(4)], [(0, 5), (2, 3)]) for _ in range(3)]
    result = packed(policy, [group], weighted(), shares=shares_unmasked)
    assert result.metrics["tokens/shared"] == 9 * 2
    assert result.distance(one_by_one(policy, [group])) < 1e-5


def test_siblings_with_nothing_in_common_are_no_tree_and_still_right() -> None:
    policy, writer = POLICIES["llama"](), Writer(7)
    group = [writer.trajectory([first, *writer.some(5)], [(0, 4)]) for first in (1, 2, 3)]
    result = packed(policy, [group], weighted(), shares=shares_unmasked)
    assert result.metrics["tokens/shared"] == 0
    assert result.distance(one_by_one(policy, [group])) < 1e-5


def test_equal_siblings_share_their_prompt_and_nothing_that_was_sampled() -> None:
    policy, writer = POLICIES["llama"](), Writer(8)
    one = writer.trajectory(writer.some(7), [(0, 5)])
    twin = writer.trajectory(one.ids[:7], [(0, 5)])
    twin.ids = list(one.ids)
    result = packed(policy, [[one, twin]], weighted(), shares=shares_unmasked)
    assert result.metrics["tokens/shared"] == 7
    assert result.distance(one_by_one(policy, [[one, twin]])) < 1e-5


# --- no cross-talk


@pytest.mark.parametrize("name", ["llama", "sliding", "mixed-eager"])
@pytest.mark.parametrize("shares", [shares_never, shares_unmasked])
def test_changing_one_sequence_changes_no_other_by_a_bit(name: str, shares: Shares) -> None:
    policy, groups = POLICIES[name](), random_groups(3)
    before = packed(policy, groups, weighted(), shares=shares).logprobs
    everyone = [trajectory for group in groups for trajectory in group]
    for changed in everyone:
        first = changed.trained.index(True)
        kept = changed.ids
        changed.ids = kept[:first] + [(token + 1) % 256 for token in kept[first:]]
        after = packed(policy, groups, weighted(), shares=shares).logprobs
        changed.ids = kept
        moved = {token for token, logprob in after.items() if logprob != before[token]}
        its_own = {v for v, trained in zip(changed.versions, changed.trained, strict=True) if trained}
        assert moved == its_own


def test_changing_a_shared_prompt_changes_its_siblings_and_nobody_else() -> None:
    policy, groups = POLICIES["llama"](), random_groups(4)
    before = packed(policy, groups, weighted(), shares=shares_unmasked).logprobs
    group = max(groups, key=len)
    for trajectory in group:
        trajectory.ids[0] = (trajectory.ids[0] + 1) % 256
    after = packed(policy, groups, weighted(), shares=shares_unmasked).logprobs
    moved = {token for token, logprob in after.items() if logprob != before[token]}
    assert moved == {v for t in group for v, trained in zip(t.versions, t.trained, strict=True) if trained}


# --- the algorithms' losses


ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "dr_grpo": lambda: dr_grpo.make(DrGrpoSpec()),
    "grpo": lambda: grpo.make(GrpoSpec()),
    "rloo-kl": lambda: rloo.make(RlooSpec(kl_coef=0.3)),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("policy_name", ["llama", "lora"])
def test_the_loss_does_not_depend_on_how_the_step_is_cut(name: str, policy_name: str) -> None:
    policy, algorithm = POLICIES[policy_name](), ALGORITHMS[name]()
    policy.keep_reference()
    with torch.no_grad():
        for _, tensor in policy.trainable():
            tensor.add_(torch.randn_like(tensor), alpha=0.02)
    groups = [group for group in random_groups(1, 8) if len(group) > 1]
    whole = packed(policy, groups, algorithm)
    for micro_tokens in (16, 50, 128):
        for shares in (shares_never, shares_unmasked):
            cut = packed(policy, groups, algorithm, micro_tokens=micro_tokens, shares=shares)
            assert cut.distance(whole) < 1e-5


def test_samples_without_credit_are_counted_and_not_computed() -> None:
    policy, algorithm, writer = POLICIES["llama"](), ALGORITHMS["dr_grpo"](), Writer(9)
    group = [writer.trajectory(writer.some(6), [(0, 5)]) for _ in range(3)]
    for trajectory, reward in zip(group, (0.0, 0.5, 1.0), strict=True):
        trajectory.reward = reward
    result = packed(policy, [group], algorithm)
    # The same rewards, told so that rounding leaves the middle one a credit too small to matter.
    group[1].reward = 0.5 + 1e-12
    computed = packed(policy, [group], algorithm)
    assert (result.metrics["tokens/computed"], computed.metrics["tokens/computed"]) == (22, 33)
    assert result.metrics["tokens/trained"] == computed.metrics["tokens/trained"] == 15
    shared = replace(computed, logprobs={token: computed.logprobs[token] for token in result.logprobs})
    assert result.distance(shared) < 1e-6


# --- what a batch says of itself


def test_a_batch_counts_its_tokens_and_their_age() -> None:
    writer = Writer(10)
    prompt = writer.some(8)
    group = [writer.trajectory(prompt, [(0, 3), (2, 4)]), writer.trajectory(prompt, [(0, 5)])]
    for trajectory, version in zip(group, (6, 4), strict=True):
        trajectory.versions = [version if trained else -1 for trained in trajectory.trained]
    batch = make_batch([group], weighted(), micro_tokens=100, version=7, shares=shares_unmasked, device=CPU)
    assert batch.totals == Totals(tokens=12, sequences=2)
    assert batch.metrics == {
        "tokens/trained": 12.0,
        "tokens/credited": 12.0,
        "tokens/computed": 22.0,
        "tokens/shared": 8.0,
        "tokens/fullest_micro": 22.0,
        "lag/max": 3.0,
        "lag/mean": pytest.approx((7 * 1 + 5 * 3) / 12),
    }
    assert batch.task_ids == [trajectory.task_id for trajectory in group]


@pytest.mark.parametrize("micro_tokens", [16, 64, 200])
def test_a_micro_batch_holds_no_more_positions_than_asked_or_one_row(micro_tokens: int) -> None:
    groups = random_groups(11, 20)
    batch = make_batch(groups, weighted(), micro_tokens=micro_tokens, version=0, shares=shares_never, device=CPU)
    sizes = [micro.ids_BT.shape for micro in batch.micro]
    assert all(rows == 1 or rows * width <= micro_tokens for rows, width in sizes)
    assert sum(len(micro.target_N) for micro in batch.micro) == batch.totals.tokens


def test_advantages_that_an_environment_gives_itself_take_the_place_of_the_algorithm_s() -> None:
    writer, algorithm = Writer(11), dr_grpo.make(DrGrpoSpec())
    prompt = writer.some(4)
    given, other = writer.trajectory(prompt, [(0, 2)]), writer.trajectory(prompt, [(0, 3)])
    given.reward, other.reward = 1.0, 0.0
    given.advantages = [9.0] * len(prompt) + [0.5, -2.0]
    batch = make_batch([[given, other]], algorithm, micro_tokens=100, version=7, shares=shares_never, device=CPU)
    of_the_algorithm = algorithm.credit([[given, other]])[0][1]
    credits = [credit for micro in batch.micro for credit in micro.credit_N.tolist()]
    assert sorted(credits) == pytest.approx(sorted([0.5, -2.0, *of_the_algorithm]))


def test_tokens_of_an_unknown_version_are_counted_and_have_no_lag() -> None:
    writer = Writer(12)
    group = [writer.trajectory(writer.some(4), [(0, 3)]) for _ in range(2)]
    for trajectory in group:
        trajectory.versions = [6 if trained else -1 for trained in trajectory.trained]
    assert "tokens/version_unknown" not in _of(group).metrics
    group[0].versions[-2:] = [UNKNOWN_VERSION] * 2
    metrics = _of(group).metrics
    assert metrics["tokens/version_unknown"] == 2
    assert (metrics["lag/max"], metrics["lag/mean"]) == (1, 1)


def _of(group: Group) -> Batch:
    return make_batch([group], weighted(), micro_tokens=100, version=7, shares=shares_never, device=CPU)
