"""reasoning-gym's problems by name. The tests with the library run where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import pytest

from tandem.env.human_player import HumanChat
from tandem.env.load import load_environment
from tandem.errors import SpecError
from tandem.spec.load import parse_spec

TWO = {"problems": 200, "config": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}
HAS_IT = importlib.util.find_spec("reasoning_gym") is not None
needs_it = pytest.mark.skipif(not HAS_IT, reason="needs reasoning-gym")


def score(environment: Any, reply: str) -> dict[str, float]:
    chat = HumanChat(lambda _: reply, lambda _: None)
    return dict(asyncio.run(environment.run(environment.tasks("train")[0], chat)).metrics)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(
        SpecError, match=r"'reasoning_gym:chain_sum': needs reasoning-gym; pip install 'tandem-rl\[reas"
    ):
        load_environment("reasoning_gym:chain_sum")


def test_it_is_scored_in_workers():
    train = {"steps": 1, "lr": 1e-4, "groups_per_step": 2, "group_size": 4}
    raw = {"recipe": "rl", "model": {"preset": "tiny"}, "environment": {"name": "reasoning_gym:chain_sum"}}
    assert parse_spec({**raw, "train": train}).environment.workers == 8


@needs_it
def test_questions_are_split_without_overlap_and_the_same_each_time():
    first, second = load_environment("reasoning_gym:chain_sum", TWO), load_environment("reasoning_gym:chain_sum", TWO)
    train, held_out = ({task.messages[0]["content"] for task in first.tasks(split)} for split in ("train", "eval"))
    assert not train & held_out
    assert 0.06 < len(held_out) / (len(train) + len(held_out)) < 0.2
    assert [task.id for task in first.tasks("train")] == [task.id for task in second.tasks("train")]


@needs_it
def test_the_library_scores_what_stands_between_the_tags_or_the_whole_reply():
    environment: Any = load_environment("reasoning_gym:chain_sum", TWO)
    question = environment.tasks("train")[0].payload["question"]
    right = str(eval(question.partition(":")[2].strip(" =")))  # noqa: S307 - the library made it
    assert score(environment, f"It is <answer>{right}</answer>.") == {"correct": 1.0, "score": 1.0, "marked": 1.0}
    assert score(environment, right) == {"correct": 1.0, "score": 1.0, "marked": 0.0}
    assert score(environment, "<answer>100000</answer>")["correct"] == 0.0


@needs_it
@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("chain_sun", {}, "unknown; did you mean 'chain_sum'"),
        (
            "chain_sum",
            {"config": {"terms": 2}},
            r"unexpected keyword argument 'terms'; the fields of chain_sum: allow_neg",
        ),
        ("chain_sum", {"config": {"min_terms": -1}}, "min_terms must be positive; the fields of chain_sum"),
        ("chain_sum", {"problems": 1}, "problems = 1: choose between 16"),
    ],
)
def test_a_wrong_name_or_field_is_refused_with_those_that_there_are(name: str, params: dict[str, Any], said: str):
    with pytest.raises(SpecError, match=said):
        load_environment(f"reasoning_gym:{name}", params)
