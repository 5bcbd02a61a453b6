"""GSM8K and MATH: generated, or read from a directory by `datasets`, and scored by math-verify."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from written_chat import WrittenChat

from tandem.env.adapters.math_score import MathScore, MathScorer
from tandem.env.adapters.maths import last_boxed
from tandem.env.adapters.maths_made import word_problems
from tandem.env.load import load_environment
from tandem.errors import EnvironmentFailed, SpecError
from tandem.rollout.workers.forkserver_client import Order
from tandem.rollout.workers.pool import WorkerEnvironment
from tandem.types import Outcome

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'tandem-rl[math]'")


def played(environment: Any, task: Any, reply: str) -> Outcome:
    return asyncio.run(environment.run(task, WrittenChat([reply])))


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_problems_made_by_code_are_the_same_every_time_all_different_and_solved_by_their_own_solutions(name):
    environment = load_environment(name, {"problems": 160})
    again = load_environment(name, {"problems": 160})
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert [*train, *held_out] == [*again.tasks("train"), *again.tasks("eval")]
    assert load_environment(name, {"problems": 160, "seed": 1}).tasks("train") != train
    questions = [task.messages[0]["content"] for task in (*train, *held_out)]
    assert len(set(questions)) == len(questions) == 160
    assert 8 <= len(held_out) <= 40
    for task in held_out:
        solution = environment.demonstrate(task, None)[0]["content"]
        assert played(environment, task, solution).reward == 1.0, task


def test_the_calculations_of_a_word_problem_are_right():
    for problem in word_problems(300, 4, 0):
        calculations = re.findall(r"<<([\d+*/-]+)=(\d+)>>", problem.solution)
        assert len(calculations) == 4
        for left, right in calculations:
            assert value(ast.parse(left, mode="eval").body) == int(right), problem
        assert problem.answer == calculations[-1][1]


def value(node: Any) -> float:
    if isinstance(node, ast.Constant):
        return node.value
    left, right = value(node.left), value(node.right)
    return {"Add": left + right, "Sub": left - right, "Mult": left * right, "Div": left / right if right else 0}[
        type(node.op).__name__
    ]


ANSWERS = [
    ("gsm8k", "72", "48 + 24 = 72\n#### 72", 1.0),
    ("gsm8k", "72", "#### 72 apples", 1.0),
    ("gsm8k", "72", "#### $72.00", 1.0),
    ("gsm8k", "1234", "#### 1,234", 1.0),
    ("gsm8k", "72", "so there are 72.", 1.0),
    ("gsm8k", "72", "72 it is, or\n#### 71", 0.0),
    ("gsm8k", "72", "#### 71\nNo, better:\n#### 72", 1.0),
    ("gsm8k", "72", "#### 72 or 73", 0.0),
    ("gsm8k", "72", "I cannot say", 0.0),
    ("gsm8k", "72", "", 0.0),
    ("math", "\\frac{1}{2}", "It is $\\boxed{\\frac{2}{4}}$.", 1.0),
    ("math", "\\frac{1}{2}", "so \\boxed{0.5}", 1.0),
    ("math", "2\\sqrt{3}", "\\boxed{\\sqrt{12}}", 1.0),
    ("math", "x^2 + 3x + 2", "\\boxed{(x+1)(x+2)}", 1.0),
    ("math", "(1,2)", "\\boxed{(2,1)}", 0.0),
    ("math", "3", "first \\boxed{3}, no: \\boxed{4}", 0.0),
    ("math", "3", "\\boxed{\\undefined{", 0.0),
]


@pytest.mark.parametrize(("name", "answer", "reply", "reward"), ANSWERS)
def test_answers_are_equal_when_they_mean_the_same(environments, name, answer, reply, reward):
    environment = environments[name]
    task = environment.tasks("train")[0]
    task.payload["answer"] = answer
    assert played(environment, task, reply).reward == reward


@pytest.fixture(scope="module")
def environments() -> dict[str, Any]:
    return {name: load_environment(name, {"problems": 16}) for name in ("gsm8k", "math")}


# --- a data set


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def gsm8k(tmp_path, monkeypatch) -> Path:
    """In the schema of openai/gsm8k."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [
        {"question": f"What is {n} and 1,000?", "answer": f"{n}+1000=<<{n}+1000={n + 1000}>>\n#### 1,{n:03}"}
        for n in range(9)
    ]
    write(tmp_path / "gsm8k/train.jsonl", rows[:6])
    write(tmp_path / "gsm8k/test.jsonl", rows[6:])
    return tmp_path / "gsm8k"


def test_gsm8k_is_read_by_datasets_from_a_directory(gsm8k):
    environment = load_environment("gsm8k", {"dataset": str(gsm8k)})
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert (len(train), len(held_out)) == (6, 3)
    assert train[2].id == "train-2"
    assert train[2].messages[0]["content"].startswith("What is 2 and 1,000?\n\n")
    assert held_out[0].payload["answer"] == "1006"
    assert played(environment, held_out[0], "I think #### 1,006").reward == 1.0
    assert played(environment, held_out[0], "I think #### 1,007").reward == 0.0


def test_math_is_read_with_its_levels_and_answers_with_nested_braces(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [
        {
            "problem": f"Halve {n}.",
            "level": f"Level {n % 5 + 1}",
            "type": "Algebra",
            "solution": f"It is $\\boxed{{\\frac{{{n}}}{{2}}}}$.",
        }
        for n in range(20)
    ]
    write(tmp_path / "math/train.jsonl", rows)
    write(tmp_path / "math/test.jsonl", rows[:5])
    environment = load_environment("math", {"dataset": str(tmp_path / "math"), "levels": [2, 3]})
    assert [task.id for task in environment.tasks("train")] == [f"train-{n}" for n in range(20) if n % 5 in (1, 2)]
    task = environment.tasks("train")[0]
    assert task.payload["answer"] == "\\frac{1}{2}"
    assert played(environment, task, "\\boxed{0.5}").reward == 1.0


def test_what_is_wrong_with_a_data_set_is_said(gsm8k):
    with pytest.raises(SpecError, match=r"'train' has no column problem and solution; found: question, answer"):
        load_environment("math", {"dataset": str(gsm8k)})
    with pytest.raises(SpecError, match="is in 'train' and in 'eval'"):
        load_environment("gsm8k", {"dataset": str(gsm8k), "eval_split": "train"})
    with pytest.raises(EnvironmentFailed, match=r"tasks\('train'\) raised \w+"):
        load_environment("gsm8k", {"dataset": str(gsm8k / "none")})
    with pytest.raises(SpecError, match="problems = 2: choose between"):
        load_environment("gsm8k", {"problems": 2})
    write(gsm8k / "train.jsonl", [{"question": "Why?", "answer": "because"}])
    with pytest.raises(SpecError, match="row 0 of 'train' has no question, or no answer in its answer"):
        load_environment("gsm8k", {"dataset": str(gsm8k), "subset": "default"})


def test_the_last_box_counts_with_its_braces():
    assert last_boxed("\\boxed{1} and \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert last_boxed("none") == last_boxed("\\boxed{never closed") == ""


# --- the scorer


def test_an_answer_that_takes_for_ever_or_kills_the_scorer_is_wrong_and_the_next_one_is_scored(monkeypatch):
    scorer = MathScorer(timeout_s=1)

    async def ask() -> list[MathScore]:
        first = await scorer.score("$3$", "$3$")
        assert scorer.process is not None
        tower = await scorer.score("$3$", "$9^{9^{9^{9^{9}}}}$")
        scorer.process.kill()
        dead = await scorer.score("$3$", "$3$")
        return [first, tower, dead, await scorer.score("$3$", "$3$")]

    started = time.monotonic()
    first, tower, dead, after = asyncio.run(ask())
    assert first == after == MathScore(correct=True)
    assert not tower.correct
    assert dead == MathScore(correct=False, scored=False) or dead == MathScore(correct=True)
    assert time.monotonic() - started < 30
    scorer.close()


def test_a_scorer_that_stands_still_is_ended_and_the_event_loop_goes_on(monkeypatch):
    scorer = MathScorer(timeout_s=1)

    async def ask() -> tuple[MathScore, int]:
        await scorer.score("$3$", "$3$")
        assert scorer.process is not None
        scorer.process.send_signal(signal.SIGSTOP)
        asked = asyncio.create_task(scorer.score("$3$", "$3$"))
        ticks = 0
        while not asked.done():
            await asyncio.sleep(0.05)
            ticks += 1
        return await asked, ticks

    verdict, ticks = asyncio.run(ask())
    assert verdict == MathScore(correct=False, scored=False)
    assert ticks > 20
    scorer.close()


def test_in_a_worker_the_scorer_is_the_worker_s():
    environment = WorkerEnvironment(Order("gsm8k", {"problems": 32}, load_timeout_s=60), 1)
    task = environment.tasks("eval")[0]
    solution = load_environment("gsm8k", {"problems": 32}).demonstrate(task_of(task.id), None)[0]["content"]

    async def both() -> list[float]:
        try:
            chats = [WrittenChat([solution]), WrittenChat(["#### -1"])]
            return [(await environment.run(task, chat)).reward for chat in chats]
        finally:
            environment.close()
            await asyncio.sleep(0.05)

    assert asyncio.run(both()) == [1.0, 0.0]


def task_of(task_id: str) -> Any:
    return next(task for task in load_environment("gsm8k", {"problems": 32}).tasks("eval") if task.id == task_id)


def test_the_scorer_s_process_ends_with_it():
    scorer = MathScorer()
    asyncio.run(scorer.score("$3$", "$3$"))
    process = scorer.process
    assert process is not None
    assert process.poll() is None
    del scorer
    deadline = time.monotonic() + 20
    while process.returncode is None and time.monotonic() < deadline:  # its thread may hold it for a moment
        time.sleep(0.01)
    assert process.returncode is not None
