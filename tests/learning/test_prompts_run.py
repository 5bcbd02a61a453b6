"""A whole run on a data set with reward functions: one of them crashes its process, and the trainer goes on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import Train
from tandem import recipes
from tandem.errors import TooManyFailures
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.run_ending import digest_run

SCORE = """
import os

TRAINER = {pid}

def letters(reply, target):
    assert os.getpid() != TRAINER
    return sum(character.isalpha() for character in reply) / (len(reply) + 1)

def brief(completions, target, **kwargs):
    if target == ["boom"]:
        os._exit(9)
    return [1.0 - len(said) / 20 for said in completions]
"""


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "score.py").write_text(SCORE.format(pid=os.getpid()))
    rows = [{"question": f"say {n}", "target": "boom" if n == 3 else str(n), "shown": "abc"} for n in range(12)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = [f"{tmp_path}/score.py:letters", {"fn": f"{tmp_path}/score.py:brief", "weight": 0.5}]
    return {
        "recipe": "rl",
        "model": {"preset": "tiny"},
        "environment": {
            "name": "prompts",
            "params": {
                "data": {"path": str(tmp_path / "q.jsonl"), "columns": {"completion": "shown"}, "eval_share": 0.2},
                "reward": reward,
            },
            "max_failed_share": 1.0,
        },
        "warmup": {"steps": 1, "batch_size": 4, "lr": 1e-3},
        "train": {"steps": 6, "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "max_tokens": 8},
        "eval": {"tasks": 2},
        "checkpoint": {"every": 1, "keep_every": 1},
    }


@pytest.mark.usefixtures("one_thread")
def test_a_crashing_reward_costs_its_groups_and_not_the_trainer(train: Train, spec: dict[str, Any]):
    run = train(spec)
    assert run.status["state"] == "succeeded"
    rows = [row for row in run.rows("metrics") if "reward/mean" in row]
    assert all(0 <= row["env/letters"] <= 1 for row in rows)
    for row in rows:
        assert row["reward/mean"] == pytest.approx(row["env/letters"] + 0.5 * row["env/brief"], abs=1e-6)
    assert sum(row.get("groups/dropped/crashed", 0) for row in rows) >= 1
    assert "12 rows read as prompts (column question), 12 used, 0 left out" in run.printed
    report = (run.directory / "report.html").read_text()
    assert "What the answers earned" in report
    assert "<td>letters</td>" in report


@pytest.mark.usefixtures("one_thread")
def test_a_reward_that_always_raises_ends_the_run_and_is_named(train: Train, spec: dict[str, Any], tmp_path: Path):
    (tmp_path / "score.py").write_text(SCORE.format(pid=0).replace("isalpha()", "isalfa()"))
    spec["environment"]["max_failed_share"] = 0.2
    del spec["warmup"]
    with pytest.raises(TooManyFailures) as failed:
        train(spec)
    assert "letters' raised AttributeError: 'str' object has no attribute 'isalfa'" in str(failed.value)
    assert "score.py:" in str(failed.value)
    assert "q.jsonl:" in str(failed.value)


@pytest.mark.usefixtures("one_thread")
def test_without_workers_and_resumed_a_run_comes_to_the_same_bytes(train: Train, spec: dict[str, Any], tmp_path: Path):
    (tmp_path / "score.py").write_text(SCORE.format(pid=0).replace("boom", "quiet"))
    run = train(spec)
    options = {row["option"]: row for row in run.rows("events") if row["stage"] == "option"}
    assert options["deterministic"]["engaged"]
    spec["environment"]["workers"] = 0
    assert digest_run(train(spec, name="here").directory) == digest_run(run.directory)
    again = tmp_path / "again"
    shutil.copytree(run.directory, again)
    for version in Checkpoints(again).versions():
        if version > 4:
            shutil.rmtree(again / "checkpoints" / f"step-{version}")
    status = json.loads((again / "status.json").read_text())
    (again / "status.json").write_text(json.dumps({**status, "state": "running"}))
    assert recipes.resume(again)["state"] == "succeeded"
    assert digest_run(again) == digest_run(run.directory)


@pytest.mark.usefixtures("one_thread")
def test_a_mix_has_lines_for_each_of_its_environments(train: Train, spec: dict[str, Any], tmp_path: Path):
    (tmp_path / "score.py").write_text(SCORE.format(pid=os.getpid()).replace("boom", "quiet"))
    spec["environment"] = [
        {**spec["environment"], "label": "said", "weight": 2.0, "workers": 3},
        {"name": "sort", "params": {"letters": 3}},
    ]
    spec["train"]["steps"], spec["train"]["groups_per_step"], spec["eval"]["tasks"] = 2, 6, 3
    run = train(spec)
    assert run.status["eval"]["metric"] == "reward"
    keys = {key for row in run.rows("metrics") for key in row}
    assert {"env/said/reward", "env/said/letters", "env/said/brief", "env/sort/reward", "env/sort/correct"} <= keys
    assert "<td>sort/reward</td>" in (run.directory / "report.html").read_text()
    means = [event["means"] for event in run.rows("events") if event["stage"] == "evaluation by environment"]
    assert means
    assert set().union(*means) == {"said", "sort"}
    assert "   of which s" in run.printed
