"""What a second job does to what the first one taught: without replay it is gone, with a quarter of it it stays."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tandem.algo import sft
from tandem.model.policy import CausalPolicy
from tandem.model.presets import make_model
from tandem.online.sample_replay import Reservoir, content_key
from tandem.ops.byte_sizes import shares_never
from tandem.optim.adamw import AdamW
from tandem.optim.master_weights import Float32
from tandem.optim.optimizer import Optimizer
from tandem.rollout.recorded_producer import record
from tandem.spec.optim import AdamWSpec
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch, plain_row
from tandem.train.trainer import PolicyTrainer
from tandem.types import Group, Trajectory

CPU, FACTS, STEPS = torch.device("cpu"), 6, 40
TOKENIZER = byte_tokenizer()


def word(rng: random.Random) -> str:
    return "".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3))


def facts(what: str) -> list[Trajectory]:
    rng, renderer = random.Random(what), Renderer(TOKENIZER)
    asked = [(f"{what} of {word(rng)}?", word(rng)) for _ in range(FACTS)]
    return [
        record(renderer, [{"role": "user", "content": q}, {"role": "assistant", "content": a}], q) for q, a in asked
    ]


def loss(policy: CausalPolicy, taught: Sequence[Trajectory]) -> float:
    rows = [(each.ids, each.trained.index(True)) for each in taught]
    scored = torch.cat([policy.score(plain_row(ids, first, CPU), 1.0) for ids, first in rows])
    return -scored.mean().item()


def teach(module: Any, fresh: Sequence[Trajectory], replay: Reservoir[Trajectory] | None, count: int) -> CausalPolicy:
    policy = CausalPolicy(module, TOKENIZER)
    named, rule = policy.trainable(), AdamW(AdamWSpec())
    optimizer = Optimizer(named, {name: rule for name, _ in named}, Float32())
    trainer = PolicyTrainer(policy, sft.make(), optimizer, lr=lambda step: 3e-3, clip_norm=1.0)
    for step in range(STEPS):
        again = replay.draw(count, step=step) if replay else []
        groups: list[Group] = [[each] for each in (*fresh, *again)]
        trainer.step(make_batch(groups, sft.make(), micro_tokens=4096, version=0, shares=shares_never, device=CPU))
    return policy


@pytest.mark.usefixtures("one_thread")
def test_a_quarter_of_replay_keeps_what_an_earlier_job_taught():
    first, second = facts("Capital"), facts("River")
    policy = teach(make_model("tiny", TOKENIZER, seed=0), first, None, 0)
    assert loss(policy, first) < 0.1
    replay = Reservoir[Trajectory](100)
    for each in first:
        replay.add(content_key(each.ids), "first job", each)
    forgot = teach(copy.deepcopy(policy.module), second, None, 0)
    kept = teach(copy.deepcopy(policy.module), second, replay, FACTS // 3)
    assert loss(forgot, second) < 0.1
    assert loss(kept, second) < 0.3
    assert loss(forgot, first) > 2.0
    assert loss(kept, first) < 0.2 * loss(forgot, first)
