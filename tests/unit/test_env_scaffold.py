"""`tandem env new` and `tandem env try`."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tandem.env.human_player import HumanChat, try_environment
from tandem.env.load import load_environment
from tandem.env.scaffold import new_environment
from tandem.errors import EpisodeFailed, SpecError
from tandem.spec.load import load_spec
from tandem.spec.run import RlSpec


def answers(*texts: str):
    lines = iter(texts)

    def ask(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    return ask


def test_a_new_environment_loads_through_its_new_spec(tmp_path: Path):
    code, spec_path = new_environment("word_play", tmp_path)
    assert (code.name, spec_path.name) == ("word_play.py", "word_play.toml")
    spec = load_spec(spec_path)
    assert isinstance(spec, RlSpec)
    assert spec.warmup is not None
    environment = load_environment(spec.environment.name, spec.environment.params)
    assert type(environment).__name__ == "WordPlay"
    assert len(environment.tasks("train")) > 5_000
    assert len(environment.tasks("eval")) > spec.eval.tasks


def test_its_demonstrations_are_right_as_often_as_its_reward_says(tmp_path: Path):
    code, _ = new_environment("word_play", tmp_path)
    environment, rng = load_environment(str(code)), random.Random(0)
    rewards: list[float] = []
    for index, task in enumerate(environment.tasks("train")[:20]):
        shown = environment.demonstrate(task, rng)[0]["content"]  # type: ignore[attr-defined]
        outcome = try_environment(str(code), split="train", index=index, ask=answers(shown), tell=lambda text: None)
        rewards.append(outcome.reward)
    assert 0 < sum(rewards) < len(rewards)


BAD_NAMES = ["", "W", "1word", "a-b", "../x", "sort", "random", "tandem", "class", "none", "task", "x" * 99, "é", "a\n"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused(tmp_path: Path, name: str):
    with pytest.raises(SpecError, match="name = "):
        new_environment(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken", ["mine.py", "mine.toml"])
def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path, taken: str):
    (tmp_path / taken).write_text("precious")
    with pytest.raises(SpecError, match="exists already"):
        new_environment("mine", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "precious"


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(SpecError, match="is not a directory"):
        new_environment("mine", tmp_path / "nowhere")


def test_a_person_plays_an_episode_and_sees_the_reward():
    lines: list[str] = []
    task = load_environment("guess").tasks("eval")[0]
    secret = task.payload["secret"]
    miss = task.payload["low"] if task.payload["low"] != secret else secret + 1
    outcome = try_environment("guess", {}, ask=answers(str(miss), str(secret)), tell=lines.append)
    assert outcome.reward == 1.0
    assert task.messages[0]["content"] in lines[0]
    assert lines[1].split("> ")[1] == ("higher" if miss < secret else "lower")
    assert lines[-1].endswith("reward> 1  correct 1  turns 2")


def test_an_index_past_the_end_is_refused():
    with pytest.raises(SpecError, match="index = 10000000: 'eval' of 'sort' has tasks 0 to"):
        try_environment("sort", index=10_000_000)


def test_a_split_that_no_environment_has_is_refused(tmp_path: Path):
    """Also where the environment itself does not look at it."""
    code, _ = new_environment("bare", tmp_path)
    code.write_text(
        code.read_text()
        + "\n\n_tasks = Bare.tasks\nBare.tasks = lambda self, split: _tasks(self, split.replace('foo', 'eval'))\n"
    )
    with pytest.raises(SpecError, match="split = 'foo': an environment has 'train' and 'eval'"):
        try_environment(code, split="foo", ask=lambda shown: "x", tell=lambda text: None)


def test_a_run_that_returns_a_number_is_told_what_to_return(tmp_path: Path):
    code, _ = new_environment("bare", tmp_path)
    code.write_text(code.read_text().replace('Outcome(reward=correct, metrics={"correct": correct})', "correct + 0.5"))
    with pytest.raises(EpisodeFailed, match=r"run\(\) returned [01]\.\d*; return an Outcome, as in `return Outcome"):
        try_environment(code, ask=lambda shown: "x", tell=lambda text: None)


def test_the_end_of_the_input_ends_the_episode():
    with pytest.raises(EpisodeFailed, match="input ended"):
        try_environment("sort", ask=answers(), tell=lambda text: None)


async def _reply(text: str, *stop: str) -> str:
    return (await HumanChat(answers(text), lambda line: None).reply(stop=stop)).text


@pytest.mark.parametrize(
    ("stop", "left"), [((), "one.two;"), ((".",), "one"), ((";", "."), "one"), (("!",), "one.two;")]
)
def test_a_typed_reply_ends_at_the_first_stop_string(stop: tuple[str, ...], left: str):
    assert asyncio.run(_reply("one.two;", *stop)) == left
