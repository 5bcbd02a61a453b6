"""GRPO on two ranks with an engine in its own process: every version is proven, and the reward rises."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rank_rewards import LARGEST_GAP, one_run


@pytest.mark.parametrize("max_lag", [0, 1])
def test_two_ranks_learn_with_every_version_proven(max_lag: int, tmp_path: Path) -> None:
    row = one_run(0, max_lag, 2, steps=12, warmup=80, directory=tmp_path / "run")
    assert row["all_proven"]
    assert row["senders"] == ["2"]
    assert row["versions"] >= 13
    assert row["largest_gap"] <= LARGEST_GAP
    assert row["last"] > row["first"] + 0.05
