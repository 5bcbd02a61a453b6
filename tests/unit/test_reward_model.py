"""A reward model: its score is that of transformers' class, however answers are packed; what does not go is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tandem.algo import reward_model
from tandem.env.prompts.ready_rewards import READY
from tandem.errors import SpecError
from tandem.model.presets import make_model
from tandem.model.reward_head import RewardPolicy, with_reward_head
from tandem.ops.byte_sizes import shares_never, shares_unmasked
from tandem.rollout.judge import RewardModelJudge
from tandem.rollout.recorded_producer import record_pair
from tandem.spec.hardware import Hardware, choose
from tandem.spec.load import parse_spec
from tandem.spec.preference import RewardModelSpec
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PAIRS = [("hello there", "good day to you", "no"), ("and?", "yes", "not at all, not here")]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(byte_tokenizer())


@pytest.fixture
def module(renderer: Renderer) -> Any:
    made = with_reward_head(make_model("tiny", renderer.tokenizer, seed=0), renderer.tokenizer, renderer.end_id).eval()
    assert not made.score.weight.any(), "before training all answers tie"
    torch.nn.init.normal_(made.score.weight, std=0.05, generator=torch.Generator().manual_seed(1))
    return made


def theirs(module: Any, ids: list[int], padding: int = 0) -> torch.Tensor:
    """The score that transformers computes."""
    padded = torch.tensor([ids + [module.config.pad_token_id] * padding])
    mask = torch.tensor([[1] * len(ids) + [0] * padding])
    return module(input_ids=padded, attention_mask=mask).logits[0, 0]


@pytest.mark.parametrize("shares", [shares_never, shares_unmasked], ids=["alone", "prompts shared"])
def test_the_loss_and_its_gradient_are_those_of_transformers_scores(module: Any, renderer: Renderer, shares: Any):
    groups = [
        record_pair(renderer, said("user", prompt), said("assistant", good), said("assistant", bad), "t")
        for prompt, good, bad in PAIRS
    ]
    policy = RewardPolicy(module, renderer.tokenizer)
    algorithm = reward_model.make(RewardModelSpec(centre_coef=0.1))
    batch = make_batch(groups, algorithm, micro_tokens=512, version=0, shares=shares, device=CPU)
    (micro,) = batch.micro
    loss, sums = algorithm.loss(policy.logprobs(micro, 1.0), micro, batch.totals)
    loss.backward()
    mine = {name: tensor.grad.clone() for name, tensor in module.named_parameters()}
    module.zero_grad()
    scores_P2 = torch.stack([torch.stack([theirs(module, each.ids, number) for each in group])
                             for number, group in enumerate(groups)])  # fmt: skip
    margin_P = scores_P2[:, 0] - scores_P2[:, 1]
    expected = torch.nn.functional.softplus(-margin_P).mean() + 0.1 * scores_P2.sum(1).square().mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert sums["reward/margin"].item() / batch.totals.tokens == pytest.approx(margin_P.mean().item(), abs=1e-5)
    assert sums["reward/accuracy"].item() / batch.totals.tokens == pytest.approx((margin_P > 0).float().mean().item())
    for name, tensor in module.named_parameters():
        assert torch.allclose(mine[name], tensor.grad, atol=1e-5), name
    assert mine["score.weight"].abs().max() > 0


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def test_the_padding_is_never_the_end_of_a_turn(renderer: Renderer):
    for unknown, padding in (("<|pad|>", "<|pad|>"), (None, None)):
        tokenizer = byte_tokenizer()
        tokenizer.pad_token, tokenizer.unk_token = tokenizer.eos_token, unknown
        made = with_reward_head(make_model("tiny", tokenizer, seed=0), tokenizer, renderer.end_id)
        assert tokenizer.pad_token == padding
        assert made.config.pad_token_id == tokenizer.pad_token_id != renderer.end_id


def test_the_ready_reward_asks_for_the_score_of_the_whole_conversation():
    asked: list[Any] = []
    judge = RewardModelJudge(lambda messages: asked.append(list(messages)) or -1.25)

    async def ask(messages: Any) -> str:
        return await judge.ask(messages, max_tokens=1)

    prompt = [{"role": "user", "content": "hello"}]
    assert asyncio.run(READY["reward_model"]()("bye", messages=prompt, judge=ask)) == -1.25
    assert asked == [[*prompt, {"role": "assistant", "content": "bye"}]]


PREFERENCE: dict[str, Any] = {
    "recipe": "preference", "model": {"preset": "tiny"}, "data": {"path": "a.jsonl"},
    "algorithm": {"kind": "reward_model"}, "train": {"steps": 1, "lr": 1e-3},
}  # fmt: skip
RL: dict[str, Any] = {
    "recipe": "rl", "model": {"preset": "tiny"},
    "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 1, "group_size": 2},
    "environment": {"name": "prompts", "params": {"data": "a.csv", "reward": [{"fn": "reward_model", "weight": 2.0}]}},
}  # fmt: skip
WRONG = {
    "adapters": ({**PREFERENCE, "model": {"preset": "tiny", "lora": {"rank": 4}}}, "model.lora: .*trains all weights"),
    "packed": ({**PREFERENCE, "model": {"preset": "tiny", "attention": "packed"}}, "model.attention = 'packed'"),
    "ranks": ({**PREFERENCE, "parallel": {"ranks": 2}}, "parallel.ranks = 2: .* in one process; leave .parallel. out"),
    "no judge": (RL, "reward = 'reward_model': needs the model; add .environment.judge."),
    "another judge": (
        {**RL, "environment": {**RL["environment"], "judge": {"kind": "engine"}}},
        "reward = 'reward_model': needs the model",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_go_is_refused_by_name(case: str):
    spec, said = WRONG[case]
    with pytest.raises(SpecError, match=said):
        parse_spec(spec)


def test_on_a_gpu_no_packed_rows_are_chosen_for_it():
    spec = {**PREFERENCE, "model": {"path": "org/name"}}
    on_gpu, choices = choose(parse_spec(spec), Hardware("cuda", "NVIDIA H200", 139.8))
    assert (on_gpu.model.attention, on_gpu.precision.weights) == ("sdpa", "bfloat16")
    assert any("no lm-head" in each.why for each in choices)
    assert choose(parse_spec({**spec, "algorithm": {}}), Hardware("cuda"))[0].model.attention == "packed"


def test_the_model_of_a_mixed_environment_is_needed_too():
    parts = [{"name": "sort"}, {"name": "prompts", "params": {"data": "a.csv", "reward": "reward_model"}}]
    with pytest.raises(SpecError, match="reward = 'reward_model': needs the model"):
        parse_spec({**RL, "environment": parts})
