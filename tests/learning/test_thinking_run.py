"""A run with thinking on: the model from scratch thinks without an end, and that is what its metrics say."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Train

SPEC: dict[str, Any] = {
    "recipe": "rl",
    "model": {"preset": "tiny", "thinking": True},
    "environment": {"name": "sort"},
    "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 2, "group_size": 2, "max_tokens": 16},
    "eval": {"tasks": 4},
}


@pytest.mark.usefixtures("one_thread")
def test_the_spec_s_penalty_reaches_the_rewards(train: Train):
    penal = SPEC | {"train": SPEC["train"] | {"thinking_length_penalty": 0.5}}
    free, paid = (train(spec, name=name).rows("metrics")[0] for name, spec in (("free", SPEC), ("paid", penal)))
    assert free["thinking/unclosed"] == paid["thinking/unclosed"] == 1.0
    assert free["thinking/tokens"] == paid["thinking/tokens"] > 8
    assert free["reward/mean"] == 0.0
    assert paid["reward/mean"] == pytest.approx(-0.5 * paid["thinking/tokens"] / 16)
