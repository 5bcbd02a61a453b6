"""A run with thinking on: the model from scratch thinks without an end, and that is what its metrics say."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Train

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
def test_the_spec_s_penalty_reaches_the_rewards(train: Train):
    trained = train(SPEC)
    (metrics,) = trained.rows("metrics")
    assert metrics["thinking/unclosed"] > 0.5
    assert 16 < metrics["thinking/tokens"] < 64
    assert metrics["reward/mean"] == pytest.approx(-0.5 * metrics["thinking/tokens"] / 64)
    assert trained.status["eval"]["after"] == 0
