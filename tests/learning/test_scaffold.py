"""What `tandem env new` writes is not only valid: it learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Train
from tandem.env.scaffold import new_environment

pytestmark = pytest.mark.usefixtures("one_thread", "no_report")


def test_a_new_environment_learns_as_its_own_spec_says_only_shorter(train: Train, tmp_path: Path):
    _, spec = new_environment("shout", tmp_path)
    shorter = (
        "environment.params.letters=3",
        "warmup.steps=120",
        "train.steps=10",
        "train.groups_per_step=8",
        "eval.tasks=128",
    )
    trained = train(spec, *shorter)
    judged = trained.status["eval"]
    assert trained.status["verdict"] == "improved"
    assert judged["before_rl"] <= 0.4
    assert judged["after"] >= judged["before_rl"] + 0.3
    rewards = [row["reward/mean"] for row in trained.rows("metrics") if row["stage"] == "rl"]
    assert sum(rewards[-3:]) > sum(rewards[:3])
