"""Several environments in one run: shares, labels, metrics, and what is refused."""

from __future__ import annotations

import asyncio
import random
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tandem.env.human_player import HumanChat
from tandem.env.load import load_environment
from tandem.env.mix import mean_by_part
from tandem.errors import SpecError
from tandem.spec.load import load_spec, parse_spec, to_toml

HEAD = 'recipe = "rl"\nmodel.preset = "tiny"\ntrain = { steps = 1, lr = 1e-4, groups_per_step = 4, group_size = 4 }\n'
TWO = [
    {"name": "sort", "params": {"letters": 3}, "weight": 3, "label": "letters"},
    {"name": "arithmetic", "params": {"largest": 9}},
]
ONE_TASK = """
from tandem.types import Outcome, Task
class Small:
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": "?"},)) for n in range(4)]
    async def run(self, task, chat):
        await chat.reply()
        return Outcome(-2.0, {"odd": 1.0})
"""


def mix(*parts: dict[str, Any]) -> Any:
    return load_environment("mix", {"parts": list(parts)})


def labels(environment: Any, split: str) -> Counter[str]:
    return Counter(task.id.partition("/")[0] for task in environment.tasks(split))


def test_tasks_have_the_shares_of_the_weights_and_each_training_task_is_there():
    environment, parts = mix(*TWO), [load_environment(part["name"], part["params"]) for part in TWO]
    train, held_out = labels(environment, "train"), labels(environment, "eval")
    for found in (train, held_out):
        assert found["letters"] / (found["letters"] + found["arithmetic"]) == pytest.approx(0.75, abs=0.02)
    for label, part in zip(("letters", "arithmetic"), parts, strict=True):
        ids = {
            task.id.removeprefix(f"{label}/").partition("~")[0]
            for task in environment.tasks("train")
            if task.id.startswith(label)
        }
        assert ids == {task.id for task in part.tasks("train")}
        assert held_out[label] <= len(part.tasks("eval"))  # none twice
    assert len({task.id for task in environment.tasks("train")}) == train.total()


def test_a_task_is_played_by_its_own_environment_and_counted_under_its_label(tmp_path: Path):
    (tmp_path / "small.py").write_text(ONE_TASK)
    environment = mix(TWO[1], {"name": str(tmp_path / "small.py")})
    found = {}
    for task in environment.tasks("train"):
        chat = HumanChat(lambda _: "no number", lambda _: None)
        found[task.id.partition("/")[0]] = asyncio.run(environment.run(task, chat))
    assert (found["small"].reward, found["small"].metrics) == (-2.0, {"small/odd": 1.0, "small/reward": -2.0})
    assert found["arithmetic"].metrics == {"arithmetic/correct": 0.0, "correct": 0.0, "arithmetic/reward": 0.0}
    assert not hasattr(environment, "demonstrate")
    assert not environment.replies_first


def test_it_demonstrates_where_every_part_does():
    environment = mix(*TWO)
    rng = random.Random(0)
    tasks = environment.tasks("train")
    assert [environment.demonstrate(tasks[index], rng)[0]["role"] for index in (0, len(tasks) - 1)] == ["assistant"] * 2


def test_a_list_of_tables_in_a_spec_is_a_mix_and_one_value_counts_for_all(tmp_path: Path):
    (tmp_path / "small.py").write_text(ONE_TASK)
    text = HEAD + '[[environment]]\nname = "small.py"\nworkers = 3\n[[environment]]\nname = "sort"\nweight = 2.5\n'
    (tmp_path / "a.toml").write_text(text)
    environment = load_spec(tmp_path / "a.toml").environment
    assert environment is not None
    assert (environment.name, environment.workers) == ("mix", 3)
    small, sort = environment.params["parts"]
    assert (small["name"], sort["weight"]) == (str(tmp_path / "small.py"), 2.5)
    assert parse_spec(tomllib.loads(to_toml(load_spec(tmp_path / "a.toml")))).environment == environment


REFUSED = [
    ('[[environment]]\nname = "sort"\n[[environment]]\nname = "sort"\n', "two are called 'sort'; give each a label"),
    ('[[environment]]\nname = "sort"\n[[environment]]\nweight = 2.0\n', r"environment\[1\]\.name: is missing"),
    ('[[environment]]\nname = "sort"\nweight = 0.0\n', r"weight = 0\.0 of 'sort': must be a positive number"),
    ('[[environment]]\nname = "sort"\nlabel = "a/b"\n', "label = 'a/b': write letters"),
    (
        '[[environment]]\nname = "sort"\nworkers = 2\n[[environment]]\nname = "guess"\nworkers = 3\n',
        r"environment\[1\]\.workers = 3: another \[\[environment\]\] has 2",
    ),
    (
        '[[environment]]\nname = "sort"\nwaight = 1.0\n',
        r"environment\[0\]\.waight = 1\.0: unknown here; did you mean 'weight'",
    ),
]


@pytest.mark.parametrize(("text", "said"), REFUSED, ids=[said[:30] for _, said in REFUSED])
def test_a_wrong_list_is_refused(text: str, said: str):
    with pytest.raises(SpecError, match=said):
        parse_spec(tomllib.loads(HEAD + text))


def test_a_weight_that_makes_an_endless_epoch_is_refused():
    with pytest.raises(SpecError, match=r"of 'arithmetic', as a share of all, makes an epoch of .*raise its weight"):
        mix(TWO[0], {"name": "arithmetic", "weight": 1e-6})


def test_held_out_scores_are_averaged_for_each_part():
    assert mean_by_part(["a/1", "b/1", "a/2"], [1.0, 0.5, 0.0]) == {"a": 0.5, "b": 0.5}
