"""The gallery's environments: splits apart, demonstrations full marks, wrong answers none. No training here."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.env.load import load_environment

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
NAMES = sorted(path.parent.name for path in GALLERY.glob("*/run.toml"))


def reward(environment, task, reply: str) -> float:
    async def say():
        return SimpleNamespace(text=reply)

    return asyncio.run(environment.run(task, SimpleNamespace(reply=say))).reward


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_scores_demonstrations_fully_and_wrong_answers_not(name: str):
    environment = load_environment(GALLERY / name / f"{name}.py")
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert train
    assert held_out
    assert not {task.id for task in train} & {task.id for task in held_out}
    for task in [*train, *held_out]:
        (shown,) = environment.demonstrate(task, random.Random(0))
        assert reward(environment, task, shown["content"]) == 1.0
        assert reward(environment, task, "nonsense") == reward(environment, task, "") == 0.0


def test_sql_scores_rows_and_may_not_write():
    environment = load_environment(GALLERY / "sql" / "sql.py")
    task = next(task for task in environment.tasks("train") if task.id.startswith("largest"))
    query = task.payload["query"]
    assert reward(environment, task, query.upper()) == 1.0
    assert reward(environment, task, query.replace("max", "min")) == 0.0
    for written in (
        "drop table x", "delete from x", "select 1; select 2", "attach ':memory:' as y", "pragma query_only = off",
        f"select length(zeroblob(1000000000)), {query[7:]}",
        "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n",
    ):  # fmt: skip
        assert reward(environment, task, written) == 0.0
