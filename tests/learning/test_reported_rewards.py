"""What an RL run reports about rewards: on their own scale, and with answers if all of them are 0."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from conftest import Train
from tandem import recipes
from tandem.cli.main import app
from tandem.errors import NothingLearned, TooManyFailures
from tandem.obs.live_view import LiveView
from tandem.runs.compare import compare_runs, compare_text
from tandem.runs.eval_files import read_evals
from tandem.runs.model_card import model_card
from tandem.spec.load import parse_spec

ENVIRONMENT = """
from itertools import count

from tandem import Outcome, Task

PLAYED = count()


class Base:
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": str(n)},), {"n": n}) for n in range(8)]

    async def run(self, task, chat):
        return self.score(task, (await chat.reply()).text)


class Fines(Base):
    def score(self, task, text):
        if task.id == "eval-3":
            raise ValueError("no score for this one")
        return Outcome(-20.0 + sum(map(ord, text)) % 3, {"letters": len(text)})


class Lost(Base):
    def score(self, task, text):
        return Outcome(0.0, {"correct": 0.0})

    def demonstrate(self, task, rng):
        return [{"role": "assistant", "content": "one"}]


class Forgetful(Base):
    def score(self, task, text):
        return Outcome(float(len(text) % 2), {"correct": 1.0} if next(PLAYED) < 8 else {})
"""


def spec_of(directory: Path, name: str, **train: Any) -> dict[str, Any]:
    (directory / "told.py").write_text(ENVIRONMENT)
    stage = {"steps": 2, "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "max_tokens": 4}
    return {
        "recipe": "rl",
        "model": {"preset": "tiny"},
        "environment": {"name": f"{directory / 'told.py'}:{name}"},
        "train": stage | train,
        "eval": {"tasks": 8, "every": 1},
    }


def test_a_reward_is_told_on_its_own_scale_wherever_it_is_told(train: Train, tmp_path: Path, one_thread: None):
    trained = train(spec_of(tmp_path, "Fines"))
    status, directory = trained.status, trained.directory
    judged, before = status["eval"], f"{status['eval']['before_rl']:.4g}"
    assert judged["metric"] == "reward"
    assert -20 <= judged["before_rl"] <= -18
    assert f"evaluation before RL: reward {before}" in trained.printed
    assert "held-out reward" in trained.printed
    assert [row["eval/reward"] for row in trained.rows("metrics") if "eval/reward" in row] == [judged["step 1"]]
    kept = read_evals(directory)
    assert {each.metric for each in kept} == {"reward"}
    for each in kept:  # the failed episode is not the best of them
        assert each.failed == 1
        assert each.scores[list(each.tasks).index("eval-3")] == min(each.scores) < -17
    runner = CliRunner()
    watched = runner.invoke(app, ["watch", str(directory), "--once"]).output
    played = runner.invoke(app, ["eval", str(directory)]).output
    report = (directory / "report.html").read_text()
    compared, card = compare_text(compare_runs([directory, directory])), model_card(directory, "model")
    assert "reward a task, mean over 8 held-out tasks" in played
    assert "held-out reward" in report
    assert "pipeline_tag: text-generation" in card
    for text in (trained.printed, played, report, compared, card):
        assert before in text
    for text in (trained.printed, played, report, compared, card, watched):
        assert "accuracy" not in text
        assert not re.search(r"-\d+\.\d %", text)  # -1900.0 %
        assert "00.0 points" not in text


@pytest.mark.usefixtures("one_thread")
def test_where_every_answer_scores_0_the_run_shows_some_and_ends_long_before_its_last_step(tmp_path: Path):
    spec = spec_of(tmp_path, "Lost", steps=100, group_size=2) | {"warmup": {"steps": 1, "lr": 1e-3, "batch_size": 2}}
    printed = io.StringIO()
    view = LiveView("run", Console(file=printed, width=200))
    with pytest.raises(NothingLearned) as ended:
        recipes.run(parse_spec(spec | {"eval": {"tasks": 8}}), tmp_path / "run", view=view)
    told = printed.getvalue().splitlines()
    first, second = (told.index(f"   evaluation before {what}: 0.0 %") for what in ("training", "RL"))
    assert "were wrong" not in told[first + 1]  # a warm-up is still to come
    assert told[second + 1] == "   all 8 answers were wrong, such as:"
    for line, number in zip(told[second + 2 : second + 5], (1, 2, 3), strict=True):
        assert re.fullmatch(r'   task eval-\d: ".*"(, cut off by the limit on tokens)?: reward 0', line), number
    said = str(ended.value).splitlines()
    assert said[0].startswith(
        "train: 20 steps in a row, up to version 21, learned nothing: no token of the batch had any"
    )
    assert said[0].endswith("or raise train.max_idle_steps (100)")
    assert said[1].startswith("likely ")
    assert [line[:14] for line in said[3:]] == ["   task train-"] * 3
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (early,) = [event for event in events if event["stage"] == "no_reward"]
    assert f"Likely {early['reason']}: " in early["message"]
    steps = [event["number"] for event in events if event["stage"] in ("error", "rl")]
    assert steps[0] < early["number"] < steps[1]
    assert sum("nothing to learn from yet" in line for line in told) == 1
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["failure"]["rule"]) == ("failed", "nothing-learned")
    assert said[2] in status["error"]


def test_an_environment_that_forgets_its_correct_later_is_not_scored_by_something_else(
    train: Train, tmp_path: Path, one_thread: None
):
    with pytest.raises(TooManyFailures, match="8 of 8 episodes failed"):
        train(spec_of(tmp_path, "Forgetful"))
    assert "its metrics lack `correct`, which earlier evaluations had" in (tmp_path / "run" / "log.txt").read_text()
