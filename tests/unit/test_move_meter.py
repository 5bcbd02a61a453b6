"""What an update moved, measured on few tokens: they are scored as in their whole micro-batch, and they are few."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_image_rows import IMAGES, row, seeing
from test_packed_attention import by_spans
from torch import Tensor
from trainers import CPU, LORA, PlainDescent, make_optimizer, make_policy, make_trainer

from tandem.algo import dr_grpo, sft
from tandem.model.forward import Forward
from tandem.ops import packed_attention
from tandem.ops.lm_head import Head
from tandem.ops.vision import Vision
from tandem.spec.algorithm import DrGrpoSpec
from tandem.train.batch_packing import make_batch
from tandem.train.move_meter import few_tokens
from tandem.types import Batch, Group, MicroBatch, Trajectory


def make_siblings(seed: int, prompt: int, least: int, most: int, size: int = 4) -> Group:
    """Answers in two turns: what stands between them is not trained."""
    rng = random.Random(seed)
    opening, group = [rng.randrange(256) for _ in range(prompt)], list[Trajectory]()
    for number in range(size):
        count = rng.randint(least, most)
        trained = [False] * prompt + [index % 11 != 7 for index in range(count)]
        ids = [*opening, *(rng.randrange(256) for _ in range(count))]
        group.append(Trajectory(ids, trained, [-5.0] * len(ids), [0] * len(ids), float(number % 2)))
    return group


def make_large(*groups: Group, tree: bool = False, micro_tokens: int = 10_000) -> Batch:
    shares: Any = lambda apart, tree_length: tree  # noqa: E731
    algorithm = dr_grpo.make(DrGrpoSpec())
    return make_batch(groups, algorithm, micro_tokens=micro_tokens, version=0, shares=shares, device=CPU)


KINDS = {
    "many short": [make_siblings(seed, 9, 3, 20) for seed in range(60)],
    "long answers": [make_siblings(seed, 30, 400, 900) for seed in range(3)],
    "long prompts": [make_siblings(seed, 700, 20, 40) for seed in range(3)],
    "of all lengths": [make_siblings(seed, 20, 5, 5 + 90 * seed) for seed in range(7)],
    "two very long": [make_siblings(1, 20, 2300, 2300, size=2)],
}
BOUNDS = {
    "many short": (500, 1100),
    "long answers": (730, 1500),
    "long prompts": (130, 3900),
    "of all lengths": (500, 1000),
    "two very long": (500, 700),
}
"""Of each kind: least tokens that are measured, and most positions that are computed for them."""


def place_of_tokens(few: MicroBatch, micro: MicroBatch) -> Tensor:
    """Return for each trained token of the part its index in the whole: they have the same credit, by a mark."""
    return torch.searchsorted(micro.credit_N, few.credit_N)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_have_the_logprobs_of_the_whole_micro_batch(kind: str, tree: bool) -> None:
    (micro, *_) = make_large(*KINDS[kind], tree=tree).micro
    micro.credit_N = torch.arange(len(micro.target_N), dtype=torch.float64)
    few, policy = few_tokens(micro), make_policy()
    of_whole = place_of_tokens(few, micro)
    assert torch.allclose(policy.score(few, 1.0), policy.score(micro, 1.0)[of_whole], atol=1e-4)
    assert torch.equal(few.ids_BT.flatten()[few.target_N], micro.ids_BT.flatten()[micro.target_N[of_whole]])
    assert torch.equal(few.sequence_N, micro.sequence_N[of_whole])
    least_tokens, most_positions = BOUNDS[kind]
    assert len(few.target_N) >= least_tokens
    assert few.ids_BT.numel() <= min(most_positions, 0.85 * micro.ids_BT.numel())
    assert len(few.sequence_N.unique()) >= min(5, len(micro.sequence_N.unique()))


@pytest.mark.parametrize("tree", [False, True])
def test_few_tokens_are_scored_alike_without_masks(tree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (micro, *_) = make_large(*KINDS["of all lengths"], tree=tree).micro
    few = few_tokens(micro)
    masked = make_policy().score(few, 1.0)
    monkeypatch.setattr(packed_attention, "why_not", lambda module: "")
    monkeypatch.setattr(packed_attention, "kernel", by_spans)
    policy = make_policy(packed=True)
    assert policy.forward.why_masked == ""
    assert torch.allclose(policy.score(few, 1.0), masked, atol=1e-4)


def test_layers_get_keys_for_few_tokens_if_they_get_them_for_the_whole() -> None:
    """Otherwise a layer is compiled once more."""
    plain, shared = make_siblings(0, 10, 400, 400), make_siblings(1, 40, 3, 3, size=2)
    shares: Any = lambda apart, tree_length: len(apart) == 2  # noqa: E731
    algorithm = dr_grpo.make(DrGrpoSpec())
    batch = make_batch([plain, shared], algorithm, micro_tokens=10_000, version=0, shares=shares, device=CPU)
    (micro,) = batch.micro
    few = few_tokens(micro)
    assert micro.packed.spans[4] is not None
    assert few.packed.spans[4] is not None
    assert (few.packed.spans[4].max() < few.ids_BT.numel()).all()


@pytest.mark.parametrize("tree", [False, True])
def test_few_tokens_keep_the_images_of_their_prompts(tree: bool) -> None:
    siblings = [
        [row(4 + seed % 3, "cat", 3, "map", answer=9), row(4 + seed % 3, "cat", 2, "dog", 1, answer=7), row(9)]
        for seed in range(60)
    ]
    shares: Any = lambda apart, tree_length: tree  # noqa: E731
    batch = make_batch(siblings, sft.make(), micro_tokens=10_000, version=0, shares=shares, device=CPU)
    (micro,) = batch.micro
    micro.credit_N = torch.arange(len(micro.target_N), dtype=torch.float64)
    few = few_tokens(micro)
    assert micro.images is not None
    assert few.images is not None
    assert few.ids_BT.numel() < 0.85 * micro.ids_BT.numel()
    assert (few.ids_BT.flatten()[few.images.places_P] == IMAGES.pad_id).all()
    assert sum(IMAGES.length(each) for each in few.images.digests) == len(few.images.places_P)
    module = seeing()
    head, forward = Head(module, 32, Vision(module, IMAGES)), Forward(module, packed=False, compiled=False)
    part, whole = (hidden_TH[source_N] for hidden_TH, source_N in (forward.hidden(head, each) for each in (few, micro)))
    assert torch.allclose(part, whole[place_of_tokens(few, micro)], atol=1e-4)


def test_images_that_cannot_be_told_apart_are_measured_whole() -> None:
    siblings = [[row(4, "cat", "map", answer=9), row(5, answer=9)] for _ in range(100)]
    batch = make_batch(siblings, sft.make(), micro_tokens=10_000, version=0, shares=lambda a, t: False, device=CPU)
    assert few_tokens(batch.micro[0]) is batch.micro[0]


def test_a_small_micro_batch_is_measured_whole() -> None:
    (micro,) = make_large(make_siblings(0, 9, 3, 20)).micro
    assert few_tokens(micro) is micro


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("kind", ["many short", "long answers", "of all lengths"])
def test_an_update_is_measured_on_few_tokens_and_nearly_as_on_all(kind: str, lora: Any) -> None:
    policy = make_policy(lora)
    trainer = make_trainer(policy, lr=lambda step: 3e-3, measure_moves=True)
    batch, scored, score = make_large(*KINDS[kind], micro_tokens=4000), list[int](), policy.score

    def noted(micro: MicroBatch, *args: Any, **options: Any) -> Tensor:
        scored.append(micro.ids_BT.numel())
        return score(micro, *args, **options)

    policy.score = noted  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(3):  # LoRA's first update moves one of two matrices
        scored.clear()
        before = torch.cat([score(micro, 1.0) for micro in batch.micro])
        moved = trainer.step(batch)["update/moved"]
        after = torch.cat([score(micro, 1.0) for micro in batch.micro])
        assert sum(scored) <= 2 * BOUNDS[kind][1]
        assert moved == pytest.approx((after - before).abs().mean().item(), rel=0.25)


def test_an_update_by_nothing_moves_nothing_though_16_bits_round() -> None:
    policy = make_policy()
    policy.module.to(torch.bfloat16)
    trainer = make_trainer(
        policy, optimizer=make_optimizer(policy, PlainDescent()), lr=lambda step: 0.0, measure_moves=True
    )
    batch = make_large(*KINDS["of all lengths"])
    assert trainer.step(batch)["update/moved"] == 0.0


def test_a_batch_that_is_set_aside_is_not_measured_and_the_next_one_is() -> None:
    trainer = make_trainer(make_policy(), measure_moves=True)
    broken = make_large(*KINDS["many short"])
    broken.micro[0].credit_N = broken.micro[0].credit_N * torch.inf
    metrics = trainer.step(broken)
    assert metrics["train/set_aside"] == 1.0
    assert "update/moved" not in metrics
    assert trainer.step(make_large(*KINDS["long answers"]))["update/moved"] > 0
