"""A run whose first answers all earn the same says so, with the likely reason: ten planted ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.algo.advantages import has_signal, has_tokens
from tandem.env.expected import Expected
from tandem.obs.claims import answers
from tandem.rollout.episode import Setting
from tandem.rollout.evaluate import Evaluation
from tandem.rollout.no_reward import RewardWatch
from tandem.rollout.producer import EnvironmentProducer
from tandem.rollout.reward_reasons import NoReward
from tandem.types import Completion, Group, Measure, Message, Outcome, Sampling, Span, Task, Thought, Ticket, Trajectory

MOST = 64


@dataclass
class Planted:
    """`says`: the answer to `a + b`. `scores`: the reward of a reply, given the right answer."""

    says: Callable[[int, int, random.Random], str]
    scores: Callable[[str, str], float]
    ask: str = "What is {a} + {b}?"
    row: Callable[[int, int], Expected] | None = None
    """The row behind a task; else its payload holds the right answer."""

    def tasks(self, split: str) -> Sequence[Task]:
        pairs = [(number + 11, 3 * number + 40) for number in range(20)]
        return [
            Task(
                f"{a}+{b}",
                ({"role": "user", "content": self.ask.format(a=a, b=b)},),
                {"answer": a + b, **({"row": self.row(a, b)} if self.row else {})},
            )
            for a, b in pairs
        ]

    async def run(self, task: Task, chat: Any) -> Outcome:
        return Outcome(self.scores((await chat.reply()).text, str(task.payload["answer"])))


class Bytes:
    """A renderer of one token a byte; 0 ends a turn."""

    def prompt(self, messages: Sequence[Message], tools: Any = ()) -> list[int]:
        return list(messages[-1]["content"].encode())

    def visible(self, ids: Sequence[int], stop: Any = ()) -> str:
        text = bytes(each for each in ids if each).decode()
        return text if not text.startswith("<think>") else text.partition("</think>")[2]

    def thought(self, ids: Sequence[int], stop: Any = ()) -> Thought | None:
        text = bytes(ids).decode()
        return Thought(len(ids), closed="</think>" in text) if text.startswith("<think>") else None


class Talker:
    version = 0

    def __init__(self, says: Callable[[int, int, random.Random], str]) -> None:
        self._says = says

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **_: Any) -> Completion:
        words = bytes(prompt_ids).decode().replace("?", " ").split()
        a, b = [int(word) for word in words if word.isdigit()][:2]
        ids = [*self._says(a, b, random.Random(sampling.seed)).encode(), 0]
        if len(ids) > sampling.max_tokens:
            return Completion(ids[:MOST], [-1.0] * MOST, [Span(0, MOST)], "length")
        return Completion(ids, [-1.0] * len(ids), [Span(0, len(ids))], "stop")


class Slots:
    """As many groups as less than two steps have: they are played, and then no more."""

    def __init__(self, count: int = 12) -> None:
        self._count, self._started, self._ended, self.all_ended = count, 0, 0, asyncio.Event()

    async def admit(self) -> Ticket:
        if self._started == self._count:
            await asyncio.Event().wait()
        self._started += 1
        return Ticket(self._started)

    async def put(self, ticket: Ticket, group: Group) -> None:
        self._ended += 1
        if self._ended == self._count:
            self.all_ended.set()

    async def drop(self, ticket: Ticket, reason: str) -> None:
        await self.put(ticket, [])


def told(
    planted: Planted, *, seconds: float = 0.0, enough: int = 32, keep: Callable[[Group], bool] = has_signal
) -> list[tuple[NoReward, str]]:
    """What is said before two steps of 32 answers are over."""
    found: list[tuple[NoReward, str]] = []
    times = iter([0.0])
    watch = RewardWatch(
        lambda reason, text: found.append((reason, text)),
        keep,
        enough=enough, max_tokens=MOST, clock=lambda: next(times, seconds),
    )  # fmt: skip

    async def play() -> None:
        slots = Slots()
        setting: Any = Setting(planted, Talker(planted.says), Bytes(), Sampling(max_tokens=MOST), 512, 5.0, 5.0)  # type: ignore[arg-type]
        producer = EnvironmentProducer(setting, slots, keep, group_size=4, seed=0, max_failed_share=1.0, watch=watch)
        running = asyncio.create_task(producer.run())
        try:
            ended = asyncio.create_task(slots.all_ended.wait())
            await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED, timeout=20)
            assert ended.done(), running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(play())
    return found


def is_equal(reply: str, right: str) -> float:
    return float(reply == right)


def raises(reply: str, right: str) -> float:
    raise KeyError("score")


SENTENCES = "First I look at the tens of both numbers, then at the ones, and carry what is over ten. After that comes"
PLANTED = {
    "whole reply": ("parser", Planted(lambda a, b, rng: f"{a} + {b} is {a + b}.", is_equal)),
    "always 0": ("scorer", Planted(lambda a, b, rng: f"{a + b}", lambda reply, right: 0.0)),
    "tag": (
        "format",
        Planted(
            lambda a, b, rng: f"The sum is {a + b}.",
            lambda reply, right: float(f"<answer>{right}</answer>" in reply),
            "What is {a} + {b} ? Put the number between <answer> and </answer>.",
        ),
    ),
    "boxed": (
        "format",
        Planted(
            lambda a, b, rng: f"It is {a + b + rng.randrange(9)}.",
            lambda reply, right: float(f"\\boxed{{{right}}}" in reply),
            "What is {a} + {b} ? Write it as \\boxed{{}}.",
        ),
    ),
    "cut off": ("length", Planted(lambda a, b, rng: SENTENCES + f"{a + b}", is_equal)),
    "never ends": ("end of turn", Planted(lambda a, b, rng: f"{a}\nuser\nWhat is {b}?\nassistant\n" * 9, is_equal)),
    "empty": ("empty", Planted(lambda a, b, rng: "", is_equal)),
    "raises": ("scorer", Planted(lambda a, b, rng: f"{a + b}", raises)),
    "always 1": ("same reward", Planted(lambda a, b, rng: f"{rng.randrange(99)}", lambda reply, right: 1.0)),
    "endless thought": ("thinking", Planted(lambda a, b, rng: "<think>" + SENTENCES * 2, is_equal)),
    "too hard": ("difficulty", Planted(lambda a, b, rng: f"{a + b + rng.randint(1, 9)}", is_equal)),
    "half of them cut off": (
        "parser",
        Planted(lambda a, b, rng: SENTENCES if rng.random() < 0.6 else f"It is {a + b}.", is_equal),
    ),
    "loud": (
        "case",
        Planted(lambda a, b, rng: f"It is N{a + b}.", is_equal, row=lambda a, b: Expected({"answer": f"n{a + b}"})),
    ),
    "two openings": (
        "template",
        Planted(lambda a, b, rng: f"assistant\nIt is {a + b}.", is_equal),
    ),
    "another column": (
        "column",
        Planted(
            lambda a, b, rng: f"It is {a + b}.",
            lambda reply, right: 0.0,
            row=lambda a, b: Expected({"sum": a + b, "number": 7000 + a}, ("number",)),
        ),
    ),
    "a column that says how": (
        "column",
        Planted(
            lambda a, b, rng: f"It is {a + b}.",
            is_equal,
            row=lambda a, b: Expected(
                {"how": f"First take all of {a}, then add {b} to it, and get #### {a + b + 1}"}, ("how",)
            ),
        ),
    ),
    "a column of words": (
        "column",
        Planted(
            lambda a, b, rng: f"{a + b}",
            lambda reply, right: 0.0,
            row=lambda a, b: Expected({"level": "easy"}, ("level",)),
        ),
    ),
    "one prompt": (
        "column",
        Planted(
            lambda a, b, rng: f"It is {rng.randrange(99)}.",
            lambda reply, right: 0.0,
            "Add 1 and 2",
            row=lambda a, b: Expected({"answer": "some", "question": f"{a} plus {b}"}, ("answer",)),
        ),
    ),
    "another row's key": (
        "answer key",
        Planted(
            lambda a, b, rng: f"{'It is' if rng.random() < 0.5 else 'I get'} {a + b}.",
            lambda reply, right: 0.0,
            row=lambda a, b: Expected({"answer": f"{a + b + 4}"}),
        ),
    ),
    "one answer": ("same answer", Planted(lambda a, b, rng: "I cannot help with that.", is_equal)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_reason_is_named_with_three_answers(name: str) -> None:
    kind, planted = PLANTED[name]
    found = told(planted)
    assert [reason.kind for reason, _ in found] == [kind]
    text = found[0][1]
    assert f"Likely {kind}: " in text
    if kind != "scorer":
        assert text.startswith("nothing to learn from yet: all of the first 32 answers earned ")
        assert text.count("   task ") == 3


def test_three_answers_are_shown_of_two_tasks_too() -> None:
    played = [
        Trajectory([], [], [], [], task_id=name, messages=[{"role": "assistant", "content": text}], reward=0.0)
        for name, text in (("a", "one"), ("a", "two"), ("b", "three"), ("b", "four"))
    ]
    shown = [line.split()[1:3] for line in answers(played).splitlines()]
    assert shown == [["a:", '"one":'], ["b:", '"three":'], ["a:", '"two":']]


@pytest.mark.parametrize(
    ("scores", "measure", "first_line"),
    [
        ([0.0, 0.0], "accuracy", "all 2 answers were wrong, such as:"),
        ([0.5, 0.5], "accuracy", "all 2 answers scored 0.5, such as:"),
        ([1.0, 1.0], "accuracy", ""),
        ([0.0, 0.0], "reward", "all 2 answers scored 0, such as:"),
        ([0.004, 0.004], "reward", "all 2 answers scored 0.004, such as:"),
        ([0.004, 0.003], "reward", ""),
        ([0.5], "accuracy", "the one answer scored 0.5:"),
        ([0.0], "accuracy", "the one answer was wrong:"),
    ],
)
def test_an_evaluation_in_which_all_score_the_same_shows_answers(
    scores: list[float], measure: Measure, first_line: str
) -> None:
    played = [
        Trajectory([], [], [], [], task_id=name, messages=[{"role": "assistant", "content": name}], reward=score)
        for name, score in zip("ab", scores, strict=False)
    ]
    lines = Evaluation(scores, played, 0, measure).all_equal.splitlines()
    assert lines[:1] == [first_line] * bool(first_line)
    assert [line.split()[1] for line in lines[1:]] == ["a:", "b:"][: len(scores)] * bool(first_line)


def test_a_run_with_a_signal_says_nothing() -> None:
    assert not told(Planted(lambda a, b, rng: f"{a + b + rng.randrange(9)}", is_equal))


def test_rewards_that_differ_between_tasks_alone_are_told_where_siblings_are_compared() -> None:
    by_task = Planted(lambda a, b, rng: f"{rng.randrange(99)}", lambda reply, right: int(right) % 5 / 1000)
    ((reason, text),) = told(by_task)
    assert reason.kind == "same reward"
    assert text.startswith(
        "nothing to learn from yet: the first 32 answers earned 0 to 0.004, equal in each task. Likely same reward: "
    )
    assert text.count("   task ") == 3
    assert not told(by_task, keep=has_tokens), "all answers of a batch are compared"


def test_the_reason_at_the_end_blames_equal_siblings_only_where_siblings_are_compared() -> None:
    def reason(keep: Callable[[Group], bool], rewards: Sequence[float]) -> str:
        watch = RewardWatch(lambda found, text: None, keep, enough=64, max_tokens=9)
        for number, reward in enumerate(rewards):
            task = Task(f"{number}", ({"role": "user", "content": "say"},))
            said = [{"role": "assistant", "content": f"{number}"}]
            played = Trajectory([1, 2], [False, True], [0, 0], [-1, 0], task_id=task.id, messages=said, reward=reward)
            watch.played(task, [played, played])
        return watch.reason()

    assert reason(has_signal, [0.1, 0.2, 0.3]).startswith("likely same reward: ")
    assert reason(has_tokens, [0.1, 0.2, 0.3]) == ""
    assert reason(has_tokens, [0.1] + [0.2] * 40), "the latest answers all earned the same"


def test_after_40_seconds_fewer_answers_are_enough() -> None:
    planted = PLANTED["too hard"][1]
    assert not told(planted, seconds=39.0, enough=10**9)
    (found,) = told(planted, seconds=41.0, enough=10**9)
    assert "all of the first 8 answers earned 0" in found[1]


def test_a_resumed_run_says_nothing_and_knows_the_reason_at_its_end() -> None:
    said: list[Any] = []
    watch = RewardWatch(lambda *each: said.append(each), has_signal, enough=2, max_tokens=MOST, begins=False)
    task = Task("1+1", ({"role": "user", "content": "What is 1+1?"},), {"answer": 2})
    reply: list[Message] = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "It is 2."}]
    watch.played(task, [Trajectory([1], [True], [0.0], [0], task_id="1+1", messages=reply) for _ in range(4)])
    assert not said
    assert watch.reason().startswith("likely parser: 4 of 4 answers hold what their task expects, as '2'")
