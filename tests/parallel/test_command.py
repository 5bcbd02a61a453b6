"""One command trains on two ranks, and gives the bytes of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_commands import here, ranks, train, write_spec

import tandem

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of the same run on one rank and on two."""
    home = tmp_path_factory.mktemp("runs")
    spec = write_spec(home)
    here("train", spec, "--run-dir", home / "1")
    done = train(spec, home / "2", *ranks(2))
    assert done.returncode == 0, done.stderr[-2000:]
    return home / "1", home / "2"


def test_two_ranks_of_one_command_give_the_bytes_of_one(runs):
    one, two = runs
    assert tandem.digest_run(two) == tandem.digest_run(one)
    assert not (one / "ranks").exists()
    assert (two / "ranks" / "1.txt").read_text() == ""


def test_what_a_rank_holds_is_what_its_plan_says(runs):
    for run, count in zip(runs, (1, 2), strict=True):
        plan = json.loads((run / "plan.json").read_text())
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        parts = next(phase["parts"] for phase in plan["phases"] if phase["name"] == "train")
        assert (plan["ranks"], len(plan["ranks_gib"])) == (count, count)
        for part in ("weights", "optimizer", "gradients"):
            assert parts[part] == pytest.approx(steps[-1][f"memory/{part}"], rel=0.01), part
        assert plan["work"]["step_tokens"] > 0
