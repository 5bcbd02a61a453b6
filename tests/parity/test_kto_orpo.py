"""ORPO and KTO against the papers' formulas, on the model's own forward of each answer alone, however a step is cut."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import LlamaForCausalLM

from tandem.algo import kto, orpo
from tandem.data.conversation import BadRow
from tandem.data.load import DataSplit
from tandem.data.rated_answers import Rated, RatedAnswer, load_rated, parse_rated
from tandem.errors import SpecError
from tandem.model.policy import CausalPolicy
from tandem.ops.byte_sizes import shares_never, shares_unmasked
from tandem.optim.adamw import AdamW
from tandem.optim.master_weights import Float32
from tandem.optim.optimizer import Optimizer
from tandem.protocols import Algorithm
from tandem.rollout.recorded_producer import with_mismatched
from tandem.spec.data import FileData
from tandem.spec.load import parse_spec
from tandem.spec.optim import AdamWSpec
from tandem.spec.preference import KtoSpec, OrpoSpec
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.train.kl_estimate import set_kl
from tandem.train.trainer import PolicyTrainer
from tandem.types import NO_VERSION, Batch, Group, Trajectory

pytestmark = pytest.mark.usefixtures("one_thread")

CUTS = [(tokens, shares) for tokens in (16, 60, 10**6) for shares in (shares_never, shares_unmasked)]


def recording(prompt: list[int], answer: list[int], reward: float) -> Trajectory:
    ids, trained = [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
    return Trajectory(ids, trained, [0.0] * len(ids), [NO_VERSION] * len(ids), reward, "recorded")


def module_of(noise: float = 0.0) -> LlamaForCausalLM:
    from transformers import LlamaConfig

    torch.manual_seed(0)
    attention: Any = {"attn_implementation": "sdpa"}
    config = LlamaConfig(
        vocab_size=len(byte_tokenizer()), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=48, max_position_embeddings=128, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **attention,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return module


def policy_of(noise: float = 0.1) -> CausalPolicy:
    """Some way from its reference."""
    policy = CausalPolicy(module_of(), byte_tokenizer())
    policy.keep_reference()
    with torch.no_grad():
        for (_, mine), theirs in zip(policy.trainable(), module_of(noise).parameters(), strict=True):
            mine.copy_(theirs)
    return policy


def some(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randint(least, most))]


def pairs(count: int = 5) -> list[Group]:
    rng = random.Random(1)
    prompts = [some(rng, 2, 9) for _ in range(count)]
    return [[recording(prompt, some(rng, 2, 9), reward) for reward in (1.0, 0.0)] for prompt in prompts]


def labelled(count: int = 6) -> list[Group]:
    rng = random.Random(2)
    answers = [recording(some(rng, 2, 9), some(rng, 2, 9), (1.0, -1.0, -1.0)[number % 3]) for number in range(count)]
    return with_mismatched(answers, 64)


def plain(module: torch.nn.Module, trajectory: Trajectory) -> Tensor:
    ids_T = torch.tensor(trajectory.ids)
    logprobs_TV = module(input_ids=ids_T[None]).logits[0, :-1].log_softmax(-1)
    return logprobs_TV.gather(-1, ids_T[1:, None]).squeeze(-1)[torch.tensor(trajectory.trained[1:])]


def batch_of(groups: list[Group], algorithm: Algorithm, micro_tokens: int, shares: object) -> Batch:
    options = {"micro_tokens": micro_tokens, "shares": shares, "device": torch.device("cpu")}
    return make_batch(groups, algorithm, version=0, **options)  # type: ignore[arg-type]


def check(algorithm: Algorithm, groups: list[Group], expected: Tensor, policy: CausalPolicy) -> None:
    """Loss and gradient of every cut are those of the plain formula."""
    tensors = [tensor for _, tensor in policy.trainable()]
    wanted = torch.autograd.grad(expected, tensors)
    largest = max(1.0, *(each.abs().max().item() for each in wanted))
    counts: set[int] = set()
    for micro_tokens, shares in CUTS:
        batch = batch_of(groups, algorithm, micro_tokens, shares)
        counts.add(len(batch.micro))
        if algorithm.needs_kl:
            set_kl(policy, [batch])
        loss = torch.zeros(())
        for micro in batch.micro:
            if algorithm.needs_reference:
                micro.reference_N = policy.reference_logprobs(micro, 1.0)
            loss = loss + algorithm.loss(policy.logprobs(micro, 1.0), micro, batch.totals)[0]
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        for found, want in zip(torch.autograd.grad(loss, tensors), wanted, strict=True):
            assert (found - want).abs().max().item() < 2e-5 * largest
    assert len(counts) > 1


def test_orpo_is_the_formula_however_the_step_is_cut() -> None:
    policy, groups, losses = policy_of(), pairs(), []
    for chosen, rejected in groups:
        good, bad = (plain(policy.module, each).mean() for each in (chosen, rejected))
        ratio = (good - torch.log(1 - good.exp())) - (bad - torch.log(1 - bad.exp()))
        losses.append(-good - 0.3 * logsigmoid(ratio))
    check(orpo.make(OrpoSpec(beta=0.3)), groups, torch.stack(losses).mean(), policy)


def plain_kl(policy: CausalPolicy, groups: list[Group]) -> float:
    reference = module_of()
    gains = [plain(policy.module, wrong).sum() - plain(reference, wrong).sum() for _, wrong in groups]
    return torch.stack(gains).mean().item()


@pytest.mark.parametrize("kl_is", ["positive", "negative"])
def test_kto_is_the_formula_however_the_step_is_cut(kl_is: str) -> None:
    policy, groups, losses = policy_of(), labelled(), []
    if kl_is == "positive":  # trained a little on the mismatched answers themselves
        optimizer = torch.optim.Adam(policy.module.parameters(), lr=3e-3)
        for _ in range(3):
            optimizer.zero_grad()
            torch.stack([-plain(policy.module, wrong).sum() for _, wrong in groups]).mean().backward()
            optimizer.step()
    kl = plain_kl(policy, groups)
    assert (kl > 0.5) == (kl_is == "positive"), kl
    reference = module_of()
    for answer, _ in groups:
        gain = plain(policy.module, answer).sum() - plain(reference, answer).sum().detach()
        good = answer.reward > 0
        beyond = 0.2 * (gain - max(0.0, kl)) * (1 if good else -1)
        losses.append((2.0 if good else 0.5) * (1 - torch.sigmoid(beyond)))
    algorithm = kto.make(KtoSpec(beta=0.2, desirable_weight=2.0, undesirable_weight=0.5))
    check(algorithm, groups, torch.stack(losses).mean(), policy)


def test_an_unmoved_policy_has_half_of_the_weight_as_its_kto_loss() -> None:
    policy, algorithm = policy_of(0.0), kto.make(KtoSpec())
    batch = batch_of(labelled(), algorithm, 10**6, shares_never)
    named, rule = policy.trainable(), AdamW(AdamWSpec())
    optimizer = Optimizer(named, {name: rule for name, _ in named}, Float32(), weight_decay=0.0)
    metrics = PolicyTrainer(policy, algorithm, optimizer, lr=lambda _: 1e-3, clip_norm=1.0).step(batch)
    assert metrics["loss/total"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["reward/accuracy"] == pytest.approx(0.5)
    assert (metrics["loss/kl"], metrics["tokens/trained"]) == (0.0, batch.totals.tokens)
    assert batch.totals.sequences == 6  # mismatched answers are not counted


def test_an_answer_that_is_certain_keeps_finite_odds_and_a_gradient() -> None:
    logprob = torch.tensor([0.0, -1e-9, -3.0], requires_grad=True)
    odds = orpo.log_odds(logprob)
    (gradient,) = torch.autograd.grad(odds.sum(), logprob)
    assert torch.isfinite(odds).all()
    assert torch.isfinite(gradient).all()
    assert (gradient >= 1).all()
    assert odds[2].item() == pytest.approx(-3 - math.log(1 - math.exp(-3)), abs=1e-6)


# --- data


def test_a_mismatched_answer_is_that_of_another_prompt_and_is_cut_to_fit() -> None:
    answers = [recording([1, 2], [3, 4], 1.0), recording([1, 2], [5], -1.0), recording([6], [7, 8, 9], 1.0)]
    groups = with_mismatched(answers, 4)
    assert [wrong.ids for _, wrong in groups] == [[1, 2, 7, 8], [1, 2, 7, 8], [6, 3, 4]]
    assert all(wrong.trained == [i >= len(own.ids) - own.num_trained for i in range(len(wrong.ids))]
               for own, wrong in groups)  # fmt: skip


USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"),
                                                                      ("assistant", "no")))  # fmt: skip


@pytest.mark.parametrize(
    ("row", "labels"),
    [
        ({"prompt": "hi", "completion": "yes", "label": True}, [True]),
        ({"prompt": [USER], "completion": [GOOD], "label": False}, [False]),
        ({"messages": [USER, GOOD], "thumbs": "down"}, [False]),
        ({"instruction": "hi", "output": "yes", "feedback": "Good"}, [True]),
        ({"prompt": "hi", "completion": "yes", "thumbs_up": "0"}, [False]),
        ({"prompt": "hi", "chosen": "yes", "rejected": "no"}, [True, False]),
    ],
)
def test_every_shape_gives_a_prompt_and_labelled_answers(row: dict[str, object], labels: list[bool]) -> None:
    prompt, answers = parse_rated(row)
    assert prompt == (USER,)
    assert answers == tuple(RatedAnswer((GOOD if len(labels) == 1 or good else BAD,), good) for good in labels)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "hi", "completion": "yes"}, "no label in its columns (prompt, completion)"),
        ({"prompt": "hi", "completion": "yes", "label": 3}, "label is neither good nor bad"),
        ({"messages": [GOOD], "label": True}, "no prompt before the answer"),
    ],
)
def test_a_bad_row_has_its_reason(row: dict[str, object], reason: str) -> None:
    with pytest.raises(BadRow) as bad:
        parse_rated(row)
    assert str(bad.value).startswith(reason)


def test_columns_are_mapped_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q,a,t\n" + "".join(f"q{i},a{i},{i % 2}\n" for i in range(40)))
    columns = {"prompt": "q", "completion": "a", "label": "t"}
    split: DataSplit[Rated] = load_rated(FileData(path=str(tmp_path / "a.csv"), columns=columns))
    assert split.report.text().startswith("40 rows read as prompt and completion with label, 40 used")
    assert all(row.answers[0].good == (row.prompt[0]["content"][-1] in "13579") for row in split.train)


SPEC = {"recipe": "preference", "model": {"preset": "tiny"}, "data": {"path": "a.csv"},
        "train": {"steps": 2, "lr": 1e-3}}  # fmt: skip


def test_a_spec_without_a_kind_is_dpo_and_kto_takes_several_ranks() -> None:
    kinds = [parse_spec(SPEC | {"algorithm": table}).algorithm.kind for table in ({"beta": 1.0}, {"kind": "orpo"})]  # type: ignore[union-attr]
    assert kinds == ["dpo", "orpo"]
    assert parse_spec(SPEC | {"algorithm": {"kind": "kto"}, "parallel": {"ranks": 2}}).parallel.ranks == 2
    with pytest.raises(SpecError, match='write recipe = "preference", and \\[algorithm\\] kind = "kto"'):
        parse_spec(SPEC | {"recipe": "kto"})
