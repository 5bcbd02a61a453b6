"""The built-in environments: what is held out, how an answer is scored, what is demonstrated."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import tandem.env
from tandem.env.builtin.arithmetic import Arithmetic
from tandem.env.builtin.guess import Guess
from tandem.env.builtin.reply_parsing import last_number
from tandem.env.builtin.sort import Sort
from tandem.env.protocol_check import check_environment
from tandem.errors import SpecError
from tandem.types import Outcome, Task

ALL = [Sort(), Arithmetic(), Guess(), Sort(letters=2), Arithmetic(largest=9, operation="-"), Guess(numbers=2)]


@dataclass
class Said:
    text: str
    truncated: bool = False


class Script:
    """A chat whose replies are known beforehand."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.said: list[object] = []

    def say(self, *messages: object) -> None:
        self.said += messages

    async def reply(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Said:
        return Said(self.replies.pop(0))


def play(environment, task: Task, *replies: str) -> tuple[Outcome, Script]:
    chat = Script(*replies)
    return asyncio.run(environment.run(task, chat)), chat


@pytest.mark.parametrize("environment", ALL, ids=repr)
def test_splits_are_disjoint_and_about_one_task_in_eight_is_held_out(environment):
    check_environment(environment, "built in")
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert 0.05 < len(held_out) / (len(train) + len(held_out)) < 0.2


def test_no_held_out_word_is_an_anagram_of_a_training_word():
    train = {"".join(sorted(task.id)) for task in Sort().tasks("train")}
    held_out = {"".join(sorted(task.id)) for task in Sort().tasks("eval")}
    assert len(train) > 20_000
    assert len(held_out) > 2_000
    assert not train & held_out


def test_no_held_out_pair_is_in_training_in_either_order():
    def pairs(split: str) -> set[tuple[int, ...]]:
        return {tuple(sorted(map(int, task.id.split("+")))) for task in Arithmetic().tasks(split)}

    assert not pairs("train") & pairs("eval")


def test_tasks_are_the_same_in_another_process():
    code = "from tandem.env.builtin.sort import Sort; print(','.join(t.id for t in Sort().tasks('eval')[:50]))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == ",".join(task.id for task in Sort().tasks("eval")[:50])


def test_an_unknown_split_is_refused():
    with pytest.raises(SpecError, match="split = 'test'"):
        Sort().tasks("test")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("abcde", 1.0), (" abcde\n", 1.0), ("dbeca", 0.0), ("abcd", 0.0), ("", 0.0), ("babcde", 0.0), ("!", 0.0),
        ('The letters of "dbeca" in order are **abcde**.', 1.0), ("Sorted: a, b, c, d, e.", 1.0), ("a b c d", 0.0),
        ("abcde is what you get from dbeca", 0.0),
    ],
)  # fmt: skip
def test_sort_rewards_only_the_sorted_word_as_the_last_of_a_reply(text: str, reward: float):
    task = Task("dbeca", ({"role": "user", "content": "sort dbeca"},), {"word": "dbeca", "answer": "abcde"})
    outcome, _ = play(Sort(), task, text)
    assert outcome == Outcome(reward, {"correct": reward})


def test_exact_sort_takes_nothing_but_the_word():
    task = Task("dbeca", ({"role": "user", "content": "sort dbeca"},), {"word": "dbeca", "answer": "abcde"})
    for text, reward in [("abcde", 1.0), (" abcde\n", 1.0), ("abcde.", 0.0), ("It is abcde", 0.0), ("a b c d e", 0.0)]:
        assert play(Sort(exact=True), task, text)[0].reward == reward


@pytest.mark.parametrize(("operation", "right"), [("+", int.__add__), ("-", int.__sub__), ("*", int.__mul__)])
def test_arithmetic_rewards_only_the_right_number(operation, right):
    environment = Arithmetic(operation=operation)
    for task in environment.tasks("eval")[:20]:
        a, b = map(int, task.messages[0]["content"].split(operation))
        assert play(environment, task, str(right(a, b)))[0].reward == 1.0
        assert play(environment, task, str(right(a, b) + 1))[0].reward == 0.0
        assert play(environment, task, "")[0].reward == 0.0
        assert play(environment, task, f"Sure! {a} {operation} {b} = {right(a, b)}.")[0].reward == 1.0
        assert play(environment, task, f"{right(a, b)} is less than {10**9}")[0].reward == 0.0


def test_arithmetic_asks_as_it_is_told_to_and_keeps_its_tasks():
    asking = Arithmetic(prompt="What is {problem}?")
    task = asking.tasks("eval")[0]
    assert task.messages[0]["content"] == f"What is {task.id}?"
    assert [each.id for each in asking.tasks("eval")] == [each.id for each in Arithmetic().tasks("eval")]
    with pytest.raises(SpecError, match=r"environment.params.prompt = 'What\?': it must contain"):
        Arithmetic(prompt="What?")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("46", 46), ("The answer is **46**.", 46), ("12+34=46", 46), ("It is 1,234.", 1234), ("46.0", 46), ("1,2,3", 3),
        ("5-12 = -7", -7), ("\u22127", -7), ("12-34", 34), ("5 - 12", 12), ("", None), ("six", None), ("٢٠", None),
    ],
)  # fmt: skip
def test_the_last_number_of_a_reply_is_what_it_says(text: str, number: int | None):
    assert last_number(text) == number


GAME = Task("10,20", ({"role": "user", "content": "guess 10-41"},), {"low": 10, "secret": 20})


def test_guess_says_higher_and_lower_until_the_number_is_found():
    outcome, chat = play(Guess(), GAME, "15", "25", "20")
    assert chat.said == ["higher", "lower"]
    assert outcome == Outcome(1.0, {"correct": 1.0, "turns": 3})
    spoken, _ = play(Guess(), GAME, "I guess 15.", "Then between 16 and 41: 25!", "Is it 20?")
    assert spoken == outcome


def test_guess_is_lost_after_its_last_turn_and_says_nothing_more():
    outcome, chat = play(Guess(turns=2), GAME, "15", "25", "20")
    assert chat.said == ["higher"]
    assert chat.replies == ["20"]
    assert outcome.reward == 0.0


@pytest.mark.parametrize("text", ["", "19.5", "twenty", "٢٠", "9" * 5000, "-20"])
def test_guess_is_lost_by_what_is_no_number(text):
    outcome, chat = play(Guess(), GAME, text)
    assert outcome.reward == 0.0
    assert chat.said == []


def test_halving_always_finds_the_number():
    environment = Guess(demo_right=1.0)
    for task in environment.tasks("eval"):
        replies = [m["content"] for m in environment.demonstrate(task, random.Random(0)) if m["role"] == "assistant"]
        assert play(environment, task, *replies)[0].reward == 1.0


@pytest.mark.parametrize("environment", [Guess(), Guess(demo_right=0.0), Guess(turns=1)], ids=repr)
def test_a_demonstrated_game_is_one_that_can_be_played(environment):
    rng = random.Random(1)
    for task in environment.tasks("train")[:200]:
        messages = environment.demonstrate(task, rng)
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        _, chat = play(environment, task, *replies)
        assert chat.said == [m["content"] for m in messages if m["role"] == "user"]
        assert messages[-1]["role"] == "assistant"


@pytest.mark.parametrize("share", [0.0, 0.35, 0.9, 1.0])
@pytest.mark.parametrize("make", [Sort, Arithmetic])
def test_the_asked_share_of_demonstrations_is_right(make, share):
    environment, rng = make(demo_right=share), random.Random(0)
    tasks = environment.tasks("train")[:2000]
    rewards = [play(environment, task, environment.demonstrate(task, rng)[0]["content"])[0].reward for task in tasks]
    assert sum(rewards) / len(rewards) == pytest.approx(share, abs=0.04)


def test_a_wrong_sort_demonstration_copies_the_word():
    task = Sort().tasks("train")[0]
    assert Sort(demo_right=0.0).demonstrate(task, random.Random(0)) == [{"role": "assistant", "content": task.id}]


@pytest.mark.parametrize(
    ("make", "params", "field"),
    [
        (Sort, {"letters": 1}, "letters = 1"),
        (Sort, {"demo_right": 1.5}, "demo_right = 1.5"),
        (Arithmetic, {"largest": 0}, "largest = 0"),
        (Guess, {"numbers": 500}, "numbers = 500"),
        (Guess, {"turns": 0}, "turns = 0"),
        (Guess, {"demo_right": float("nan")}, "demo_right = nan"),
    ],
)
def test_a_parameter_out_of_range_is_refused(make, params, field):
    with pytest.raises(SpecError, match=f"environment.params.{field}: choose between"):
        make(**params)


@pytest.mark.parametrize("name", ["arithmetic", "sort", "guess"])
def test_a_built_in_environment_has_under_60_lines(name):
    assert len((Path(tandem.env.__file__).parent / "builtin" / f"{name}.py").read_text().splitlines()) < 60
