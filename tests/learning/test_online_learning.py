"""Facts that are taught to a served model are known right after, and what it knew is not forgotten: a short form of
benchmarks/online_teach.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import online_teach


def test_a_served_model_knows_what_it_was_taught_and_no_token_is_torn(tmp_path: Path):
    told = online_teach.teach(tmp_path, facts=5, jobs=2, steps=24)
    assert told["accuracy"] >= 0.8
    assert told["torn_tokens"] == 0
    assert told["tokens_checked"] > 100
    assert told["held_out_rise"] <= told["held_out_limit"]
    assert set(told["jobs"]) == {"published"}
