"""Evaluations of a run are kept by version, and one made afterwards is compared with them task by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import Train
from tandem.build import standalone_engines
from tandem.cli.main import app
from tandem.errors import SpecError
from tandem.recipes.evaluation import evaluate_model
from tandem.runs.eval_files import StoredEval, read_evals, store_eval

ENVIRONMENT = """
from tandem import Outcome, Task


class Even:
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": str(n)},)) for n in range(8)]

    async def run(self, task, chat):
        return Outcome(float(sum(map(ord, (await chat.reply()).text)) % 2))
"""


def spec_of(directory: Path) -> dict[str, Any]:
    (directory / "even.py").write_text(ENVIRONMENT)
    stage = {"steps": 2, "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "max_tokens": 4}
    return {
        "recipe": "rl",
        "name": "evals",
        "model": {"preset": "tiny"},
        "environment": {"name": f"{directory / 'even.py'}:Even"},
        "train": stage,
        "eval": {"tasks": 6, "every": 1},
    }


def test_a_run_keeps_each_evaluation_and_eval_adds_to_them(train: Train, tmp_path: Path, one_thread: None):
    trained = train(spec_of(tmp_path))
    kept = read_evals(trained.directory)
    assert [(each.version, each.when) for each in kept] == [(0, "before_rl"), (1, "step 1"), (2, "after")]
    assert kept[-1].mean == pytest.approx(trained.status["eval"]["after"])
    assert all(each.pairs_with(kept[0]) for each in kept)
    files = {path: path.read_bytes() for path in (trained.directory / "evals").iterdir()}

    done = CliRunner().invoke(app, ["eval", str(trained.directory), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["metric"] == "reward"  # its outcomes have no `correct`
    assert told["reward"] == pytest.approx(kept[-1].mean)  # greedy, by the same rules: the same as inside the run
    assert (told["against"]["when"], told["verdict"]) == ("before_rl", trained.status["verdict"])
    assert told["paired"]["tasks"] == 6
    assert {path: path.read_bytes() for path in files} == files
    assert len(read_evals(trained.directory)) == 4
    with pytest.raises(SpecError, match="--spec"):
        evaluate_model(str(tmp_path))


def test_nothing_is_written_over_and_what_is_damaged_spoils_no_other(tmp_path: Path):
    def evaluation(version: int, score: float) -> StoredEval:
        return StoredEval(version, "eval", "accuracy", {}, ["a", "b"], [score, score])

    paths = [store_eval(tmp_path, evaluation(7, score)) for score in (0.1, 0.2, 0.3)]
    assert len(set(paths)) == 3
    store_eval(tmp_path, evaluation(3, 0.5))
    assert [each.mean for each in read_evals(tmp_path)] == pytest.approx([0.5, 0.1, 0.2, 0.3])
    paths[1].write_text(paths[1].read_text()[:40])
    assert [each.mean for each in read_evals(tmp_path)] == pytest.approx([0.5, 0.1, 0.3])


@pytest.mark.timeout(120)
def test_a_base_and_the_model_are_played_by_the_same_workers(tmp_path: Path, one_thread: None):
    """Workers belong to an event loop: in a second one their episodes waited for ever."""
    for name in ("base", "model"):
        standalone_engines.write_preset("tiny", "0", str(tmp_path / name))
    spec = spec_of(tmp_path)
    spec["environment"]["workers"] = 2
    told = evaluate_model(tmp_path / "model", spec, base=tmp_path / "base", directory=tmp_path / "evals")
    assert told.against is not None
    assert told.found.failed == told.against.failed == 0
    assert told.found.scores == told.against.scores
