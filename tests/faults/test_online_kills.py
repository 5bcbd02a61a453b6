"""An online server whose halves are killed while it learns: a short form of benchmarks/online_kills.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import online_kills

pytestmark = pytest.mark.usefixtures("forked_programs")


def test_what_is_served_is_the_version_before_or_after_and_no_job_is_trained_twice(tmp_path: Path):
    told = online_kills.trial(tmp_path, kills=2, seed=1)
    assert told["problems"] == []
    assert (told["kills"], told["double_trained"]) == (2, 0)
    assert told["before"] + told["after"] == 2
    assert min(told["server"], told["trainer"]) >= 1
