"""A run with thinking on: the model from scratch thinks without an end, and that is what its metrics say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import Train
from tandem.errors import NothingLearned

FINES = """
from dataclasses import dataclass
from itertools import count

from tandem.types import Outcome, Task


PLAYED = count()


@dataclass(frozen=True)
class Fines:
    def tasks(self, split):
        return [Task(f"{split} {number}", ({"role": "user", "content": "?"},)) for number in range(8)]

    async def run(self, task, chat):
        await chat.reply()
        return Outcome(-float(next(PLAYED) % 3))
"""

SPEC: dict[str, Any] = {
    "recipe": "rl",
    "model": {"preset": "tiny", "thinking": True},
    "environment": {"name": "sort"},
    "train": {
        "steps": 1, "lr": 1e-3, "groups_per_step": 4, "group_size": 4, "max_tokens": 64, "thinking_length_penalty": 0.5,
    },
    "eval": {"tasks": 4},
}  # fmt: skip


@pytest.mark.usefixtures("one_thread")
def test_the_spec_s_penalty_reaches_what_is_compared_and_not_the_rewards(train: Train, tmp_path: Path):
    (tmp_path / "fines.py").write_text(FINES)
    trained = train({**SPEC, "environment": {"name": str(tmp_path / "fines.py")}})
    (metrics,) = trained.rows("metrics")
    assert metrics["thinking/unclosed"] > 0.5
    assert 16 < metrics["thinking/tokens"] < 64
    assert metrics["reward/shaping"] == pytest.approx(-0.5 * metrics["thinking/tokens"] / 64)
    assert (16 * metrics["reward/mean"]).is_integer()
    assert metrics["grad/norm"] > 0


@pytest.mark.usefixtures("one_thread")
def test_what_thoughts_cost_alone_moves_no_weight(train: Train, tmp_path: Path):
    with pytest.raises(
        NothingLearned, match="1 steps, and none of them changed a weight: no token of the batch had any"
    ):
        train(SPEC)
    (metrics,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert metrics["thinking/tokens"] > 16
    assert metrics["reward/shaping"] == pytest.approx(-0.5 * metrics["thinking/tokens"] / 64)
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0, 0)
