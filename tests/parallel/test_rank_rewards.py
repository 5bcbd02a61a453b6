"""GRPO on two ranks with an engine in its own process: every version is proven, and the reward rises."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rank_rewards import LARGEST_GAP, one_run


@pytest.mark.timeout(600)
def test_versions_that_ranks_write_as_files_are_proven(tmp_path: Path) -> None:
    row = one_run(0, max_lag=0, ranks=2, steps=4, warmup=60, directory=tmp_path / "run", bridge="disk")
    assert row["all_proven"]
    assert row["versions"] >= 5
    assert row["largest_gap"] <= LARGEST_GAP


@pytest.mark.timeout(600)  # three processes on whatever cores there are
def test_two_ranks_learn_with_every_version_proven(tmp_path: Path) -> None:
    row = one_run(0, max_lag=1, ranks=2, steps=15, warmup=150, directory=tmp_path / "run")
    assert row["all_proven"]
    assert row["senders"] == ["2"]
    assert row["versions"] >= 16
    assert row["largest_gap"] <= LARGEST_GAP
    assert row["last"] > row["first"] + 0.03
