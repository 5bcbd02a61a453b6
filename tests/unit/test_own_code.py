"""A loss, credit, filter, optimizer, callback and tracker of the user's own, named by path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.errors import OwnCodeFailed, SpecError
from tandem.spec.load import load_spec

pytestmark = pytest.mark.usefixtures("one_thread")

MINE = """
import torch
from pathlib import Path

def loss(scored, micro, totals, scale=1.0):
    assert not (Path(__file__).with_name("stop").exists() and int(micro.versions_N.max()) == 2)
    ratio = (scored.logprobs_N - micro.behaviour_N).exp()
    return -scale * (ratio * micro.credit_N).sum() / totals.tokens, {"loss/ratio": ratio.sum()}

def credit(groups):
    return [[trajectory.reward - 0.5 for trajectory in group] for group in groups]

def keep(group):
    return True

def mean(groups):
    found = []
    for group in groups:
        middle = sum(t.reward for t in group) / len(group)
        found.append([[t.reward - middle] * t.num_trained for t in group])
    return found

class SignMomentum:
    by_rows = True
    def __init__(self, beta=0.9):
        self.beta = beta
    def init(self, like):
        return {"momentum": torch.zeros_like(like)}
    def update(self, value, grad, state, *, lr, step):
        state["momentum"].lerp_(grad, 1 - self.beta)
        value.sub_(lr * state["momentum"].sign())

def sgd(value, grad, state, *, lr, step):
    value.sub_(lr * grad)

class Count:
    def __init__(self):
        self.total = 0
    def on_start(self, directory):
        self.file = directory / "counted.txt"
    def on_step(self, step):
        self.total += int(step.tokens.mask_T.sum())
        return {"mine/total": self.total}
    def state(self):
        return {"total": self.total}
    def restore(self, state):
        self.total = state["total"]
    def on_end(self, status):
        self.file.write_text(f"{self.total} {status['state']}")

class Lines:
    def __init__(self, target):
        self.file = open(target.directory + "/lines.txt", "w")
    def log(self, step, numbers):
        print(step, len(numbers), file=self.file)
    def close(self):
        self.file.close()
"""

# Rewards that differ between siblings from the first step on: a model that has learned nothing says bytes of all kinds.
ASCII = """
from tandem import Outcome, Task

class Ascii:
    def tasks(self, split):
        return [Task(f"{split} {number}", ({"role": "user", "content": str(number)},)) for number in range(8)]

    async def run(self, task, chat):
        reply = await chat.reply()
        return Outcome(sum(character.isascii() for character in reply.text) / (len(reply.text) + 1))
"""


@pytest.fixture(autouse=True)
def _settings_of_torch_end_with_the_test() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "mine.py").write_text(MINE)
    (tmp_path / "specs" / "ascii.py").write_text(ASCII)
    return tmp_path / "specs"


def written(home: Path, more: str = "", name: str = "spec.toml") -> Path:
    """A spec's file; `more` are its further lines, of which those before a table come first."""
    top, _, tables = more.partition("\n\n")
    (home / name).write_text(
        f"""recipe = "rl"
{top}
[model]
preset = "tiny"
[environment]
name = "ascii.py:Ascii"
[checkpoint]
every = 1
[eval]
tasks = 2
[train]
steps = 4
lr = 1e-3
groups_per_step = 2
group_size = 3
max_tokens = 8
{tables}
"""
    )
    return home / name


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


ALL = """
optimizer = { kind = "mine.py:SignMomentum", params = { beta = 0.8 }, state_bytes = 4 }
[algorithm]
name = "mine.py:loss"
credit = "mine.py:credit"
keep = "mine.py:keep"
params = { scale = 2.0 }
"""


def test_all_of_a_file_is_trained_resumed_to_the_same_bytes_and_reported(home: Path, tmp_path: Path):
    spec = written(home, 'callbacks = ["mine.py:Count"]\n\n' + ALL)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    tandem.run(spec, whole)
    (home / "stop").touch()
    with pytest.raises(OwnCodeFailed, match=rf"(?s)mine.py:loss.*AssertionError.*{home}/mine.py:6, in loss"):
        tandem.run(spec, killed)
    assert [row["step"] for row in rows(killed)] == [1, 2]
    (home / "stop").unlink()
    tandem.resume(killed)
    assert tandem.digest_run(killed) == tandem.digest_run(whole)
    assert [row["mine/total"] for row in rows(killed)] == [row["mine/total"] for row in rows(whole)]
    assert (killed / "counted.txt").read_text() == f"{rows(whole)[-1]['mine/total']:.0f} succeeded"
    assert rows(whole)[0]["loss/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert re.search(r"mine.py:loss.{0,40}SHA-256", (whole / "report.html").read_text(), re.DOTALL)
    assert not (whole / "code.json").read_text().count("last_step")


def test_a_file_that_has_changed_is_told_when_the_run_is_resumed(home: Path, tmp_path: Path, capsys: Any):
    (home / "stop").touch()
    with pytest.raises(OwnCodeFailed):
        tandem.run(written(home, "\n\n" + ALL), tmp_path / "run")
    (home / "mine.py").write_text(MINE.replace("-scale *", "-2 * scale *"))
    (home / "stop").unlink()
    tandem.resume(tmp_path / "run")
    assert "mine.py:loss has changed since step 2" in capsys.readouterr().out
    assert "changed after step 2" in (tmp_path / "run" / "report.html").read_text()
    record = json.loads((tmp_path / "run" / "code.json").read_text())["algorithm.name"]
    assert [each["last_step"] for each in record["earlier"]] == [2]
    assert len(list((tmp_path / "run" / "code").glob("mine.*.py"))) == 2


def test_ones_own_credit_under_the_built_in_loss_gives_the_bytes_of_the_built_in_one(home: Path, tmp_path: Path):
    for name, algorithm in {"own": 'credit = "mine.py:mean"', "built_in": 'kind = "dr_grpo"'}.items():
        tandem.run(written(home, f"\n\n[algorithm]\n{algorithm}"), tmp_path / name)
    assert tandem.digest_run(tmp_path / "own") == tandem.digest_run(tmp_path / "built_in")


def test_a_tracker_of_ones_own_gets_every_row_in_its_own_process(home: Path, tmp_path: Path):
    tandem.run(written(home, '\n\n[track]\nto = ["mine.py:Lines"]'), tmp_path / "run")
    lines = (tmp_path / "run" / "lines.txt").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == [1, 2, 3, 4]


def test_a_function_is_an_optimizer_without_state(home: Path, tmp_path: Path):
    tandem.run(written(home, '\n\noptimizer = { kind = "mine.py:sgd" }'), tmp_path / "run")
    assert rows(tmp_path / "run")[-1]["update/effective_fraction"] > 0.9


WRONG = {
    "no file": ('[algorithm]\nname = "nowhere.py:loss"', "algorithm.name = 'nowhere.py:loss': no such file"),
    "no function": ('[algorithm]\nname = "mine.py:los"', "no 'los' in .*mine.py; did you mean 'loss'?"),
    "arguments": (
        '[algorithm]\nname = "mine.py:keep"',
        r"\(.*mine.py:13\): cannot be called as loss\(scored, micro, totals\): too many positional arguments",
    ),
    "params": (
        '[algorithm]\nname = "mine.py:loss"\nparams = { clip = 1 }',
        "algorithm.params.clip = 1: no function of",
    ),
    "syntax": ('[algorithm]\nname = "broken.py:loss"', r"importing the file failed: raised SyntaxError.*broken.py:1"),
    "no update": ('[train.optimizer]\nkind = "mine.py:Count"', "has no method init"),
    "state": ('[train.optimizer]\nkind = "ones.py:Ones"', r"init\(like\) made state that is not 0; begin with zeros"),
    "of torch": ('[train.optimizer]\nkind = "broken2.py:Adam"', "is a torch.optim.Optimizer"),
    "an instance": ('[track]\nto = ["mine.py:loss"]', "track.to = .*: is not a class"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_before_there_is_a_run(case: str, home: Path, tmp_path: Path):
    (home / "broken.py").write_text("def loss(:\n")
    (home / "ones.py").write_text(MINE.replace("class SignMomentum", "class Ones").replace("zeros_like", "ones_like"))
    (home / "broken2.py").write_text("from torch.optim import Adam\n")
    tables, said = WRONG[case]
    with pytest.raises((SpecError, OwnCodeFailed), match=rf"(?s){said}"):
        tandem.run(written(home, f"\n\n{tables}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


RETURNS = {
    "no loss": ("def loss(s, m, t):\n    return None", r"loss\(scored, micro, totals\) returned NoneType"),
    "a vector": ("def loss(s, m, t):\n    return s.logprobs_N", "returned a tensor of shape"),
    "no gradient": ("def loss(s, m, t):\n    return s.logprobs_N.detach().sum()", "returned a loss without a gradient"),
    "a metric": ("def loss(s, m, t):\n    return s.logprobs_N.sum(), {'x': 1}", "the metric 'x'"),
    "credit": (
        "def loss(s, m, t):\n    return s.logprobs_N.sum()\ndef credit(groups):\n    return [[1.0] for g in groups]",
        r"credit\(groups\) returned 1 entries for a group of 3",
    ),
}


@pytest.mark.parametrize("case", RETURNS)
def test_what_a_function_returns_is_checked(case: str, home: Path, tmp_path: Path):
    code, said = RETURNS[case]
    (home / "mine.py").write_text(code)
    algorithm = '[algorithm]\nname = "mine.py:loss"' + '\ncredit = "mine.py:credit"' * ("credit" in code)
    with pytest.raises(OwnCodeFailed, match=said):
        tandem.run(written(home, f"\n\n{algorithm}"), tmp_path / "run")


def test_a_file_beside_the_spec_is_taken_before_one_in_the_directory_of_the_command(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "other.py").write_text("")
    spec: Any = load_spec(written(home, '\n\n[algorithm]\nname = "mine.py:loss"\ncredit = "other.py:credit"'))
    assert spec.algorithm.name == f"{home}/mine.py:loss"
    assert spec.in_place().algorithm.credit == f"{tmp_path}/other.py:credit"
    assert spec.environment.name == f"{home}/ascii.py:Ascii"


# --- objects of Python


class Counts:
    def __init__(self, stop_at: int = 99) -> None:
        self.seen: list[int] = []
        self.stop_at = stop_at

    def on_step(self, step: tandem.Step) -> None:
        if step.version == self.stop_at:
            raise RuntimeError("enough")
        self.seen.append(step.version)


class Rows:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step: int, numbers: Any) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.steps.append(-1)


class Plain:
    def init(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def update(self, value: Any, grad: Any, state: Any, *, lr: float, step: int) -> None:
        value.sub_(lr * grad)


def plain_loss(scored: Any, micro: Any, totals: Any) -> Any:
    return -((scored.logprobs_N - micro.behaviour_N).exp() * micro.credit_N).sum() / totals.tokens


class Ascii:
    def tasks(self, split: str) -> list[tandem.Task]:
        return [tandem.Task(f"{split} {n}", ({"role": "user", "content": str(n)},)) for n in range(8)]

    async def run(self, task: tandem.Task, chat: tandem.Chat) -> tandem.Outcome:
        text = (await chat.reply()).text
        return tandem.Outcome(sum(character.isascii() for character in text) / (len(text) + 1))


OBJECT_SPEC: dict[str, Any] = {
    "recipe": "rl",
    "model": {"preset": "tiny"},
    "checkpoint": {"every": 1},
    "eval": {"tasks": 2},
    "train": {"steps": 4, "lr": 1e-3, "groups_per_step": 2, "group_size": 3, "max_tokens": 8},
}


def test_objects_train_as_files_do_and_resume_asks_for_the_same(tmp_path: Path):
    counts, tracker = Counts(), Rows()
    same: dict[str, Any] = {"environment": Ascii(), "algorithm": plain_loss, "optimizer": Plain()}
    tandem.run(OBJECT_SPEC, tmp_path / "whole", callbacks=[counts], trackers=[tracker], **same)
    assert counts.seen == [1, 2, 3, 4]
    assert tracker.steps == [1, 2, 3, 4, -1]
    with pytest.raises(OwnCodeFailed, match=r"test_own_code.Counts.*enough.*test_own_code.py:\d+, in on_step"):
        tandem.run(OBJECT_SPEC, tmp_path / "killed", callbacks=[Counts(3)], trackers=[tracker], **same)
    for wrong, said in (
        ({}, "test_own_code.Ascii.*, and got none; pass the same"),
        ({**same, "callbacks": [Rows()], "trackers": [tracker]}, "test_own_code.Counts"),
    ):
        with pytest.raises(SpecError, match=said):
            tandem.resume(tmp_path / "killed", **wrong)
    tandem.resume(tmp_path / "killed", callbacks=[Counts()], trackers=[tracker], **same)
    assert tandem.digest_run(tmp_path / "killed") == tandem.digest_run(tmp_path / "whole")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "workers": ({"environment": {"workers": 2}}, {"environment": Ascii()}, "environment.workers = 2: worker processes"),
    "twice": ({"environment": {"name": "sort"}}, {"environment": Ascii()}, "environment.name = 'sort': the"),
    "no step": ({"environment": {"name": "sort"}}, {"callbacks": [Ascii()]}, "has no method on_step"),
    "no run": ({}, {"environment": Rows()}, "it has no method tasks"),
    "ranks": (
        {
            "environment": {"name": "sort"}, "parallel": {"ranks": 2}, "engine": {"kind": "server"},
            "sync": {"bridge": "broadcast"},
        },
        {"algorithm": plain_loss},
        "the other ranks cannot get the object algorithm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_object_that_does_not_fit_is_refused(case: str, tmp_path: Path):
    changes, objects, said = REFUSED[case]
    with pytest.raises(SpecError, match=said):
        tandem.run({**OBJECT_SPEC, **changes}, tmp_path / "run", **objects)
    assert not (tmp_path / "run").exists()


def test_a_hook_gets_the_batch_by_token_and_cannot_write_to_it(tmp_path: Path):
    found: list[tandem.StepTokens] = []

    class Keeps:
        def on_step(self, step: tandem.Step) -> None:
            found.append(step.tokens)
            with pytest.raises(ValueError, match="read-only"):
                step.tokens.ids_T[0] = 0
            with pytest.raises(TypeError):
                step.metrics["x"] = 1  # pyright: ignore[reportIndexIssue]

    run = tandem.run(OBJECT_SPEC, tmp_path / "run", environment=Ascii(), callbacks=[Keeps()])
    first, row = found[0], rows(run.directory)[0]
    assert first.mask_T.sum() == row["tokens/sampled"]
    assert first.rewards_S.mean() == pytest.approx(row["reward/mean"])
    assert (first.versions_T[first.mask_T] == 0).all()
    assert (first.logprobs_T[first.mask_T] < 0).all()
    centred = first.rewards_S - [first.rewards_S[first.group_S == group].mean() for group in first.group_S]
    assert first.advantages_T[first.mask_T] == pytest.approx(centred[first.sample_T][first.mask_T], abs=1e-6)
    assert len(first.task_ids) == 6
