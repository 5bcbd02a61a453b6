"""The rollout service under kill -9: a short form of benchmarks/rollouts_kills.py, with slack for a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_nothing_acknowledged_is_lost_or_doubled_when_service_and_trainer_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import rollouts_kills

    told = rollouts_kills.trial(tmp_path, kills=3, seed=1, every_s=(0.1, 0.4))
    assert told.problems == []
    assert told.acknowledged - told.trained.keys() == set()
    assert [name for name, times in told.trained.items() if times > 1] == []
    assert len(told.acknowledged) > 20
    assert len(told.serving_s) == 3
