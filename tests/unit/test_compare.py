"""Runs side by side, and a verdict only where the same tasks were scored in the same way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.errors import RunError
from tandem.io.atomic_write import write_json
from tandem.io.jsonl import JsonlWriter
from tandem.runs.compare import compare_runs, compare_text
from tandem.runs.eval_files import StoredEval, store_eval


def made_run(directory: Path, lr: float, right: int, *, seed: int = 0) -> Path:
    directory.mkdir()
    (directory / "spec.toml").write_text(f'recipe = "rl"\nname = "{directory.name}"\n[train]\nlr = {lr}\nsteps = 3\n')
    write_json(
        directory / "status.json",
        {"state": "succeeded", "recipe": "rl", "steps_done": 3, "eval": {"before_rl": 0.1, "after": right / 40}},
    )
    with JsonlWriter(directory / "metrics.jsonl") as writer:
        for step in (1, 2, 3):
            writer.write(
                {"step": step, "stage": "rl", "reward/mean": lr * step, "time/step_s": 2.0, "memory/peak": 1.5}
            )
    tasks = [f"eval-{n}" for n in range(40)]
    for version, count in ((0, 4), (3, right)):
        scores = [float(n < count) for n in range(40)]
        store_eval(directory, StoredEval(version, "eval", "accuracy", {"seed": seed, "split": "eval"}, tasks, scores))
    return directory


def test_what_was_asked_and_what_came_of_it(tmp_path: Path):
    a, b = made_run(tmp_path / "a", 0.001, 10), made_run(tmp_path / "b", 0.01, 30)
    found = compare_runs([a, b])
    assert found.differences == {"train.lr": [0.001, 0.01]}
    (pairing,) = found.pairings
    assert pairing.verdict is not None
    assert (pairing.verdict.verdict, pairing.verdict.difference) == ("improved", 0.5)
    assert (pairing.verdict.before, pairing.verdict.after) == (0.25, 0.75)
    assert [facts["after"] for facts in found.facts] == ["25.0 %", "75.0 %"]
    assert [facts["seconds a step"] for facts in found.facts] == [2.0, 2.0]
    assert [facts["peak memory (GiB)"] for facts in found.facts] == [1.5, 1.5]
    (back,) = compare_runs([b, a]).pairings
    assert back.verdict is not None
    assert back.verdict.verdict == "worse"
    assert "b against a: improved, +0.5" in compare_text(found)


def test_other_tasks_are_not_compared(tmp_path: Path):
    a, b = made_run(tmp_path / "a", 0.001, 10), made_run(tmp_path / "b", 0.001, 30, seed=1)
    (pairing,) = compare_runs([a, b]).pairings
    assert (pairing.paired, pairing.verdict) == (False, None)
    assert "seed" in pairing.why_not


def test_a_run_of_which_little_is_left_is_shown_with_gaps(tmp_path: Path):
    a, b = made_run(tmp_path / "a", 0.001, 10), tmp_path / "b"
    b.mkdir()
    (b / "spec.toml").write_text('recipe = "rl"\n')
    (b / "metrics.jsonl").write_text('{"step": 1, "reward/mean": null}\n')
    text = compare_text(compare_runs([a, b, a]))
    assert "b has no stored evaluation" in text
    with pytest.raises(RunError, match="two runs"):
        compare_runs([a])


def test_the_command_prints_text_or_json(tmp_path: Path):
    runs = [str(made_run(tmp_path / "a", 0.001, 10)), str(made_run(tmp_path / "b", 0.01, 30))]
    assert "train.lr" in CliRunner().invoke(app, ["compare", *runs]).stdout
    told = json.loads(CliRunner().invoke(app, ["compare", *runs, "--json"]).stdout)
    assert told["pairings"][0]["verdict"]["verdict"] == "improved"
