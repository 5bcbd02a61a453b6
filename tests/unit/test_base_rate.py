"""`tandem env check` says what a model earns before it is trained, and whether there is anything to learn from."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.build.standalone_engines import write_preset
from tandem.cli.main import app
from tandem.errors import SpecError
from tandem.recipes.base_rate import _interval, measure_base_rate

ENVIRONMENT = """
from tandem import Outcome, Task


class Even:
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": str(n)},)) for n in range(8)]

    async def run(self, task, chat):
        return Outcome(float(sum(map(ord, (await chat.reply()).text)) % 2))


class Nothing(Even):
    async def run(self, task, chat):
        await chat.reply()
        return Outcome(0.0)


class Shown(Even):
    def __init__(self, right: float = 1.0):
        self.right = right

    async def run(self, task, chat):
        return Outcome(float((await chat.reply()).text == "yes"))

    def demonstrate(self, task, rng):
        return [{"role": "assistant", "content": "yes" if rng.random() < self.right else "no"}]


class Wrong(Shown):
    def demonstrate(self, task, rng):
        return [{"role": "assistant", "content": "no"}]


class Longer(Shown):
    async def run(self, task, chat):
        await chat.reply()
        return await super().run(task, chat)


class Other(Shown):
    async def run(self, task, chat):
        await chat.reply()
        chat.say("no")
        return await super().run(task, chat)

    def demonstrate(self, task, rng):
        opening = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "yes"}]
        return [*opening, *super().demonstrate(task, rng)]


class Broken(Shown):
    async def run(self, task, chat):
        raise ValueError("no score for this one")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_preset("tiny", "0", str(path))
    return str(path)


@pytest.fixture
def env(tmp_path: Path) -> str:
    (tmp_path / "odd.py").write_text(ENVIRONMENT)
    return str(tmp_path / "odd.py")


def random_half() -> list[bool]:
    """Which demonstrations of `Shown` are right, by the check's own draws."""
    rng = random.Random("demonstrations")
    rng.sample(range(8), 8)
    return [rng.random() < 0.5 for _ in range(8)]


SMALL = ["--tasks", "6", "--answers", "4", "--max-tokens", "6"]


def test_an_environment_with_differences_passes(model: str, env: str) -> None:
    done = CliRunner().invoke(app, ["env", "check", f"{env}:Even", "--model", model, *SMALL, "--json"])
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert (row["tasks"], row["group_size"], row["answers"], row["failed"]) == (6, 4, 24, 0)
    assert row["metric"] == "accuracy"
    assert row["interval"][0] < row["accuracy"] < row["interval"][1]
    assert row["groups_with_signal"] >= 0.5
    assert row["passed"] is True


def test_a_spec_whose_answers_all_earn_0_fails_with_the_reason_and_three_answers(
    model: str, env: str, tmp_path: Path
) -> None:
    spec = tmp_path / "nothing.toml"
    spec.write_text(
        f'recipe = "rl"\n[model]\npath = "{model}"\n[environment]\nname = "{env}:Nothing"\n'
        "[train]\nsteps = 1\nlr = 1e-3\ngroups_per_step = 1\ngroup_size = 2\nmax_tokens = 6\n"
    )
    done = CliRunner().invoke(app, ["env", "check", str(spec), "--tasks", "6", "--answers", "4"])
    assert done.exit_code == 1, done.output
    assert "accuracy 0.0 % (95 % interval 0.0 % to 45.9 %), 6 tasks x 4 answers" in done.stdout
    assert done.stdout.count("   task train-") == 3
    assert "Likely length: " in done.stdout  # the model was never trained, so it does not end its turns


def test_an_environment_that_always_raises_fails_by_name(model: str, env: str) -> None:
    done = CliRunner().invoke(app, ["env", "check", f"{env}:Broken", "--model", model, *SMALL])
    assert done.exit_code == 1, done.output
    assert "24 episodes failed" in done.stdout
    assert "Likely scorer: 24 episodes failed, most of them with 'raised'" in done.stdout


def checked(source: str, *options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["env", "check", source, *options, "--json"])
    assert done.exit_code in (0, 1), done.exception
    return done.exit_code, json.loads(done.stdout)


def test_a_model_must_be_named_to_be_measured(env: str) -> None:
    with pytest.raises(SpecError, match="--model: is missing"):
        measure_base_rate(f"{env}:Even")


def test_without_a_model_splits_and_demonstrations_are_checked(env: str, tmp_path: Path) -> None:
    spec = tmp_path / "scratch.toml"
    spec.write_text(
        f'recipe = "rl"\n[model]\npreset = "tiny"\n[environment]\nname = "{env}:Shown"\nparams = {{ right = 0.5 }}\n'
        "[warmup]\nsteps = 1\nlr = 1e-3\n"
        "[train]\nsteps = 1\nlr = 1e-3\ngroups_per_step = 1\ngroup_size = 2\nmax_tokens = 6\n"
    )
    code, row = checked(str(spec))
    assert (code, row["passed"], row["tasks"]) == (0, True, {"train": 8, "eval": 8})
    assert (row["demonstrations"], row["shared_prompts"], row["failures"]) == (8, 8, [])
    assert row["reward"] == row["best"] == sum(random_half()) / 8
    told = CliRunner().invoke(app, ["env", "check", str(spec)]).stdout
    assert "No model was played: --model DIR" in told
    assert "8 held-out tasks have the prompt of a training task" in told


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Wrong", ""),
        ("Longer", "the environment asks for another reply after the demonstration's last one"),
        ("Other", "the environment says 'no', the demonstration 'yes'"),
        ("Broken", "ValueError: no score for this one"),
    ],
)
def test_demonstrations_that_earn_nothing_or_go_another_way_fail_by_name(env: str, name: str, says: str) -> None:
    code, row = checked(f"{env}:{name}")
    assert (code, row["passed"]) == (1, False)
    assert len(row["failures"]) == (8 if says else 0)
    assert all(says in failure for failure in row["failures"])


def test_an_environment_without_demonstrations_passes_and_says_so(env: str) -> None:
    code, row = checked(f"{env}:Even")
    assert (code, row["demonstrations"]) == (0, 0)


def test_the_interval_is_students_and_equal_tasks_are_no_proof() -> None:
    means = [0.0, 0.25, 0.5, 0.25]
    half = 3.1824 * statistics.stdev(means) / 2
    assert _interval(means, within_one=False) == pytest.approx((0.25 - half, 0.25 + half), abs=1e-4)
    assert _interval(means, within_one=True)[0] == 0.0
    assert _interval([0.0] * 32, within_one=True) == pytest.approx((0.0, 0.1089), abs=1e-4)
    assert _interval([1.0] * 32, within_one=True) == pytest.approx((0.8911, 1.0), abs=1e-4)
