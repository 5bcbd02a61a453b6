"""The gallery's environments: splits, demonstrations, hostile answers, and what is special about each. No training."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tandem
from tandem.build import training
from tandem.env.load import load_environment
from tandem.env.scripted_chat import ScriptedChat
from tandem.errors import EpisodeFailed, SpecError
from tandem.io.tool_calls import parse_calls
from tandem.spec.load import load_spec
from tandem.spec.run import RlSpec

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
NAMES = sorted(path.parent.name for path in GALLERY.glob("*/run.toml"))
HIDDEN = {"negotiate", "nim", "tool_use"}
"""Their tasks differ in what the model is not told, so that prompts of both splits are alike."""
LUCKY = {
    "coding": 0.7, "instructions": 0.12, "nim": 0.2, "search": 0.35, "sql": 0.35,
}  # fmt: skip
"""The most that demonstrations earn which are wrong on purpose: some of their short cuts are right for some tasks."""
HOSTILE = (
    "", " \n", "nonsense", "a" * 20_000, "9" * 20_000, "-" * 20_000, "[" * 20_000, '{"name":', "nan", "-1", "1e999",
    "\x00", "\u0661\u0662", "\U0001f600" * 500, "while True: pass", "return", "find " + "find " * 4_000, "((((",
    "<tool_call>", '<tool_call>{"name": "stock", "arguments": {"item": 1}}</tool_call>',
    '<tool_call>{"name": "os.system", "arguments": {}}</tool_call>' * 100, "import os; os._exit(0)",
)  # fmt: skip


class Repeats:
    """A policy that says the same in every turn, up to a hundred times."""

    def __init__(self, text: str) -> None:
        self.text, self.turns = text, 0

    def offer(self, tools: object) -> None: ...

    def say(self, *messages: object) -> None: ...

    async def reply(self, **_: object) -> Any:
        self.turns += 1
        assert self.turns <= 100, "the episode never ends"
        text, calls = parse_calls(self.text)
        return SimpleNamespace(text=text, tool_calls=calls, truncated=True)

    async def judge(self, messages: object, **_: object) -> str:
        return self.text


def made(name: str, **params: Any) -> Any:
    return load_environment(GALLERY / name / f"{name}.py", params)


def reward(environment: Any, task: Any, text: str) -> float:
    return asyncio.run(environment.run(task, Repeats(text))).reward


def spec_of(name: str) -> RlSpec:
    spec = load_spec(GALLERY / name / "run.toml")
    assert isinstance(spec, RlSpec)
    return spec


def some(tasks: Any, count: int) -> list[Any]:
    return random.Random(0).sample(list(tasks), min(count, len(tasks)))


def demonstrated(environment: Any, tasks: list[Any]) -> list[float]:
    """Rewards of demonstrations, each played as it says."""
    rng, rewards = random.Random(0), list[float]()
    for task in tasks:
        chat = ScriptedChat(environment.demonstrate(task, rng))
        rewards.append(asyncio.run(environment.run(task, chat)).reward)
        chat.end()
        assert chat.differs == "", task.id
    return rewards


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_apart_and_the_same_each_time(name: str):
    environment = made(name)
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert len(train) >= 400
    assert len(held_out) >= spec_of(name).eval.tasks >= 128
    assert not {task.id for task in train} & {task.id for task in held_out}
    shared = {str(task.messages) for task in train} & {str(task.messages) for task in held_out}
    assert bool(shared) == (name in HIDDEN)
    assert [*train, *held_out] == [*made(name).tasks("train"), *made(name).tasks("eval")]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"negotiate"}))
def test_demonstrations_score_as_they_claim(name: str):
    count = 48 if name == "coding" else 300
    right, wrong, mixed = (made(name, demo_right=share) for share in (1.0, 0.0, 0.4))
    tasks = [*some(right.tasks("train"), count), *some(right.tasks("eval"), count // 4)]
    assert demonstrated(right, tasks) == [1.0] * len(tasks)
    lucky = sum(demonstrated(wrong, tasks)) / len(tasks)
    assert lucky <= LUCKY.get(name, 0.0)
    share = sum(demonstrated(mixed, tasks)) / len(tasks)
    assert lucky < share < 0.6 * lucky + 0.4 + 0.25


@pytest.mark.parametrize("name", NAMES)
def test_turns_of_demonstrations_fit_into_max_tokens(name: str):
    environment, rng = made(name), random.Random(0)
    longest = 0
    for task in some(environment.tasks("train"), 400):
        for turn in environment.demonstrate(task, rng):
            if turn["role"] == "assistant":
                calls = [json.dumps(call["function"]) for call in turn.get("tool_calls", ())]
                longest = max(longest, len(turn["content"].encode()) + sum(2 + len(call) for call in calls) + 1)
    assert 0 < longest <= spec_of(name).train.max_tokens  # of the tiny model: a byte, a mark of a call, or the end


@pytest.mark.parametrize("name", NAMES)
def test_hostile_answers_earn_nothing_and_break_nothing(name: str):
    environment = made(name, **({"timeout_s": 1.0} if name == "coding" else {}))
    for task in some(environment.tasks("eval"), 2 if name == "coding" else 8):
        for text in HOSTILE:
            started = time.perf_counter()
            assert reward(environment, task, text) == 0.0, text[:80]
            assert time.perf_counter() - started < 10


@pytest.mark.parametrize("name", NAMES)
def test_a_package_can_be_made_of_it(name: str):
    project = tomllib.loads((GALLERY / name / "pyproject.toml").read_text())
    module, _, named = project["project"]["entry-points"]["tandem.environments"][name].partition(":")
    assert (module, project["tool"]["setuptools"]["py-modules"]) == (name, [name])
    assert type(made(name)).__name__ == named


def test_a_wheel_of_it_holds_one_module(tmp_path: Path):
    for file in ("maths.py", "pyproject.toml"):
        (tmp_path / file).write_bytes((GALLERY / "maths" / file).read_bytes())
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(tmp_path)], check=True, capture_output=True)
    with zipfile.ZipFile(tmp_path / "acme_maths-1.0.0-py3-none-any.whl") as wheel:
        assert [name for name in wheel.namelist() if ".dist-info/" not in name] == ["maths.py"]


# --- what is special about each


def test_sql_scores_rows_and_may_not_write():
    environment = made("sql")
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


def test_an_equation_is_checked_by_its_solution_and_not_by_its_words():
    environment = made("maths")
    task = environment.tasks("eval")[0]
    solution = task.payload["result"] - task.payload["shift"]
    assert reward(environment, task, f"I move 8 over, so the unknown is {solution}.") == 1.0
    assert reward(environment, task, f"{solution}, or rather {solution + 1}") == 0.0


@pytest.fixture
def sandboxed() -> Iterator[Any]:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: `make install-system`")
    try:
        environment = training.environment(training.its_spec(spec_of("coding")).model_copy(update={"workers": 1}))
    except SpecError as error:
        pytest.skip(f"this machine refuses sandboxes: {error}")
    yield environment
    training.close(environment)


def test_code_of_an_episode_is_alone_in_its_sandbox(sandboxed: Any):
    task = sandboxed.tasks("train")[0]
    right = sandboxed.demonstrate(task, random.Random(1))[0]["content"]
    assert "(" in right
    leaves = f"open('/tmp/left', 'w')\n{right}"
    looks = f"import os\nif os.path.exists('/tmp/left') or os.path.exists('{__file__}'): raise SystemExit\n{right}"
    kills = "import os\nos.kill(-1, 9)"  # its worker too, and nothing outside of its own sandbox

    async def of(text: str) -> str:
        try:
            outcome = await sandboxed.run(task, Repeats(text))
        except EpisodeFailed as failure:
            return failure.kind
        return "right" if outcome.reward == 1.0 else "ran" if outcome.metrics["ran"] else "none"

    async def all_of() -> list[str]:
        try:
            return [await of(text) for text in (right, leaves, looks, "while True: pass", kills, right)]
        finally:
            training.close(sandboxed)

    assert asyncio.run(all_of()) == ["right", "right", "right", "none", "crashed", "right"]


def test_hidden_tests_cannot_be_printed_away():
    environment = made("coding")
    task = environment.tasks("train")[0]
    for cheat in (
        "return type('Any', (), {'__eq__': lambda *_: True, '__repr__': lambda _: '[]'})()",
        "print('[0, 0, 0, 0, 0]')\nraise SystemExit", "import sys\nsys.stdout.write('[' * 10**6)\nreturn 0",
        "return [0] * 10**9", "return f(x)",
    ):  # fmt: skip
        assert reward(environment, task, cheat) == 0.0, cheat


def test_two_people_can_play_nim():
    told, typed = list[str](), iter(["1", "3", "2", "1"])
    nim = str(GALLERY / "nim" / "nim.py")
    task = next(i for i, task in enumerate(made("nim").tasks("eval")) if task.payload["heap"] == 7)
    outcome = tandem.try_environment(
        nim, {"opponent": "judge"}, index=task, ask=lambda prompt: told.append(prompt) or next(typed), tell=told.append
    )
    assert outcome.reward == 0.0  # 7 - 1 - 3 - 2 - 1: the second player took the last one
    assert [line.strip() for line in told if line.endswith("> ")] == ["you>", "judge>", "you>", "judge>"]


def test_a_perfect_player_of_nim_beats_the_random_opponent_too():
    environment = made("nim", demo_right=1.0, opponent="random")
    tasks = some(environment.tasks("eval"), 100)
    assert demonstrated(environment, tasks) == [1.0] * 100


def test_every_instruction_is_checked_alone():
    environment = made("instructions")
    asked = {"word": "mak", "times": 2, "mark": "?", "capitals": True}
    task = tandem.Task("one", ({"role": "user", "content": ""},), asked)
    followed = {
        text: asyncio.run(environment.run(task, Repeats(text))).metrics["followed"]
        for text in ("MAK MAK?", "mak mak?", "MAK?", "MAK MAK", "mak")
    }
    assert [round(share * 3) for share in followed.values()] == [3, 2, 2, 2, 0]


def test_json_must_have_the_types_of_the_schema():
    environment = made("json_schema")
    task = next(task for task in environment.tasks("train") if "age" in task.payload["wanted"])
    name, age = task.payload["wanted"].values()
    assert reward(environment, task, f'{{"age":{age}, "name":"{name}"}}') == 1.0
    for wrong in (
        f'{{"name": "{name}", "age": "{age}"}}',
        f'{{"name": "{name}"}}',
        f'{{"name": "{name}", "age": {age}.0}}',
    ):
        assert reward(environment, task, wrong) == 0.0


def test_a_patient_buyer_saves_more_and_an_endless_one_nothing():
    hasty, patient = (
        sum(demonstrated(made("negotiate", demo_patient=share), made("negotiate").tasks("eval")))
        for share in (0.0, 1.0)
    )
    assert (hasty, patient > 150) == (0.0, True)
    task = made("negotiate").tasks("eval")[0]
    assert reward(made("negotiate"), task, "1") == 0.0
    assert reward(made("negotiate"), task, "999999") == 0.0


def test_the_search_finds_what_shares_the_rarest_words():
    environment = made("search")
    task = environment.tasks("eval")[0]
    person, fact, answer = (task.payload[key] for key in ("person", "fact", "answer"))
    chat = ScriptedChat(
        [
            {"role": "assistant", "content": f"find {person}, {fact}"},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": answer},
        ]
    )
    assert asyncio.run(environment.run(task, chat)).reward == 1.0
    assert f"'{person} " in chat.differs  # the passage that it found is about the person
    assert fact in chat.differs
    assert answer in chat.differs


def test_units_may_be_written_in_other_ways():
    units = made("units")
    task = next(task for task in units.tasks("eval") if task.id.endswith("km in m"))
    assert reward(units, task, f"That is {task.payload['answer']:,}.000") == 1.0
