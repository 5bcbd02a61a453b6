"""The training samples of a run that is resumed from each of its checkpoints: none lost, none doubled."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import resume, rl, torch_as_it_was, train
from test_run_resumed import killed_after

from tandem.io.kept_samples import samples

__all__ = ["torch_as_it_was"]
pytestmark = pytest.mark.usefixtures("one_thread", "torch_as_it_was")


def test_a_resumed_run_keeps_the_samples_of_one_that_was_never_killed(tmp_path: Path) -> None:
    train(rl(tmp_path, steps=4), tmp_path / "whole")
    expected = samples(tmp_path / "whole")
    assert [each["step"] for each in expected] == [step for step in (6, 5, 4, 3) for _ in range(8)]
    assert all(each["answer"] and each["version"] == each["step"] - 1 for each in expected)
    assert "Training samples" in (tmp_path / "whole" / "report.html").read_text()
    for version in (2, 4):
        run = killed_after(tmp_path / "whole", version, tmp_path / f"killed-{version}")
        assert resume(run)["state"] == "succeeded"
        assert samples(run) == expected
