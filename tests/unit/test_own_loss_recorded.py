"""A loss of the user's own on recorded rows: what it is called with, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.build import training
from tandem.errors import SpecError
from tandem.types import Group, Trajectory

MINE = """
def loss(scored, micro, totals):
    return -(micro.credit_N * scored.logprobs_N).sum() / totals.tokens

def halved(groups):
    return [[0.5 for _ in group] for group in groups]
"""


def spec(recipe: str, algorithm: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "recipe": recipe, "model": {"preset": "tiny"}, "data": {"path": "rows.jsonl"},
        "train": {"steps": 1, "lr": 1e-3}, "algorithm": algorithm,
    }  # fmt: skip


def answer(reward: float) -> Trajectory:
    return Trajectory([1, 2, 3], [False, True, True], [0.0] * 3, [-1] * 3, reward=reward, status="recorded")


GROUPS: dict[str, list[Group]] = {"sft": [[answer(0.0)]], "preference": [[answer(1.0), answer(0.0)]]}


@pytest.mark.parametrize(("recipe", "credit"), [("sft", [[[1.0, 1.0]]]), ("preference", [[[1.0, 1.0], [-1.0, -1.0]]])])
def test_the_credit_is_that_of_the_recipe_or_ones_own(recipe: str, credit: Any, tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE)
    named = {"name": f"{tmp_path}/mine.py:loss"}
    made = training.algorithm_of(tandem.parse_spec(spec(recipe, named)))
    assert made.credit(GROUPS[recipe]) == credit
    assert (made.name, made.together, made.needs_reference) == ("mine.py:loss", recipe == "preference", False)
    weighed = {**named, "credit": f"{tmp_path}/mine.py:halved", "reference": True}
    made = training.algorithm_of(tandem.parse_spec(spec(recipe, weighed)))
    assert made.credit(GROUPS[recipe]) == [[[0.5, 0.5] for _ in group] for group in GROUPS[recipe]]
    assert made.needs_reference


@pytest.mark.parametrize("recipe", ["sft", "preference"])
def test_a_filter_is_refused_where_all_rows_are_trained_on(recipe: str):
    with pytest.raises(SpecError, match=r"algorithm.keep = 'mine.py:keep': recorded rows are all trained on"):
        tandem.parse_spec(spec(recipe, {"name": "mine.py:loss", "keep": "mine.py:keep"}))


def test_pairs_need_a_loss():
    with pytest.raises(SpecError, match=r"algorithm.name: is missing; name the loss of a pair"):
        tandem.parse_spec(spec("preference", {"credit": "mine.py:credit"}))
