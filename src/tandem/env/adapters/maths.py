"""GSM8K and MATH: from the Hub, from a directory, or made by code; scored by math-verify.

[environment]
name = "gsm8k"                 # made by code, and so there is nothing to download

[environment.params]           # the data set itself
dataset = "openai/gsm8k"
subset = "main"
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from tandem.env.adapters.math_score import MathScorer, needs_math_verify
from tandem.env.adapters.maths_made import Problem, latex_problems, word_problems
from tandem.env.builtin.split import check_params, in_split
from tandem.errors import SpecError
from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task

Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Maths:
    """What both have in common: where problems come from, and a conversation of one reply."""

    dataset: str = ""
    """A name on the Hub, or a directory of JSONL or parquet files, as `datasets.load_dataset` takes them; empty: made
    by code."""
    subset: str = ""
    """The data set's configuration, where it has several."""
    train_split: str = "train"
    eval_split: str = "test"
    problems: int = 4000
    """How many are made by code; one in eight is held out."""
    seed: int = 0
    """Of what is made by code."""
    timeout_s: int = 3
    """For each step of scoring an answer; one that takes longer is wrong."""

    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    instruction: ClassVar[str]
    _scorer: MathScorer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_params(self, problems=(16, 1_000_000), timeout_s=(1, 60))
        needs_math_verify(self.name)
        object.__setattr__(self, "_scorer", MathScorer(self.timeout_s))

    def tasks(self, split: str) -> Sequence[Task]:
        if not self.dataset:
            made = [each for each in self._made() if in_split(split, each.question)]
            return [self._task(f"made-{self.seed}-{number}-{split}", each) for number, each in enumerate(made)]
        if split not in ("train", "eval"):
            raise SpecError(f"split = '{split}': an environment has 'train' and 'eval'")
        place = self.train_split if split == "train" else self.eval_split
        rows = _rows(self.name, self.dataset, self.subset, place, self.columns)
        return [self._task(f"{place}-{number}", self._read(number, place, row)) for number, row in enumerate(rows)]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        reply = await chat.reply()
        verdict = await self._scorer.score(self._gold(task.payload["answer"]), self._said(reply.text))
        correct = float(verdict.correct)
        return Outcome(correct, {"correct": correct, "read": float(verdict.read), "scored": float(verdict.scored)})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        return [{"role": "assistant", "content": task.payload["solution"]}]

    def _task(self, task_id: str, problem: Problem) -> Task:
        opening = {"role": "user", "content": f"{problem.question}\n\n{self.instruction}"}
        return Task(task_id, (opening,), {"answer": problem.answer, "solution": problem.solution})

    def _read(self, number: int, split: str, row: Row) -> Problem:
        question, solution = row[self.columns[0]], row[self.columns[1]]
        answer = self._answer(solution, row) if isinstance(solution, str) else ""
        if not isinstance(question, str) or not question or not answer:
            where = f"environment.params.dataset = '{self.dataset}': row {number} of '{split}'"
            raise SpecError(f"{where} has no {self.columns[0]}, or no answer in its {self.columns[1]}")
        return Problem(question, solution, answer)

    def _gold(self, answer: str) -> str:
        return f"$\\boxed{{{answer}}}$"

    def _made(self) -> list[Problem]:
        raise NotImplementedError

    def _answer(self, solution: str, row: Row) -> str:
        raise NotImplementedError

    def _said(self, text: str) -> str:
        return text


@dataclass(frozen=True)
class Gsm8k(_Maths):
    """Word problems whose answer is a number after `####`."""

    steps: int = 2
    """Of those made by code: calculations from question to answer."""

    name = "gsm8k"
    columns = ("question", "answer")
    instruction = "Think step by step, and end with the answer as a number after ####."

    def __post_init__(self) -> None:
        super().__post_init__()
        check_params(self, steps=(1, 8))

    def _made(self) -> list[Problem]:
        return word_problems(self.problems, self.steps, self.seed)

    def _answer(self, solution: str, row: Row) -> str:
        return solution.rpartition("####")[2].strip().replace(",", "") if "####" in solution else ""

    def _said(self, text: str) -> str:
        """After the last mark; without one, the reply as it is (its last number counts)."""
        after = text.rpartition("####")[2].strip()
        return after.splitlines()[0] if "####" in text and after else text


@dataclass(frozen=True)
class Math(_Maths):
    """Problems in LaTeX whose answer stands in \\boxed{}."""

    levels: tuple[int, ...] = ()
    """Of a data set with `level`: only these; all when empty."""

    name = "math"
    columns = ("problem", "solution")
    instruction = "Reason step by step, and put the final answer within \\boxed{}."

    def tasks(self, split: str) -> Sequence[Task]:
        if not self.dataset or not self.levels:
            return super().tasks(split)
        place = self.train_split if split == "train" else self.eval_split
        rows = _rows(self.name, self.dataset, self.subset, place, (*self.columns, "level"))
        wanted = [(number, row) for number, row in enumerate(rows) if _level(row["level"]) in self.levels]
        return [self._task(f"{place}-{number}", self._read(number, place, row)) for number, row in wanted]

    def _made(self) -> list[Problem]:
        return latex_problems(self.problems, self.seed)

    def _answer(self, solution: str, row: Row) -> str:
        answer = row.get("answer")
        return answer if isinstance(answer, str) and answer else last_boxed(solution)


def last_boxed(text: str) -> str:
    """What stands within the last \\boxed{...}, braces balanced; empty if there is none."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return ""
    depth, begin = 0, text.index("{", start) + 1
    for place in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return ""


def _level(level: object) -> int:
    """`Level 3` in the original, 3 in others."""
    found = re.search(r"\d+", str(level))
    return int(found[0]) if found else 0


@lru_cache(maxsize=8)
def _rows(name: str, dataset: str, subset: str, split: str, columns: tuple[str, ...]) -> list[Row]:
    """Read once: tasks are asked for again and again."""
    if importlib.util.find_spec("datasets") is None:
        raise SpecError(f"environment.name = '{name}': a data set needs datasets; pip install 'tandem-rl[math]'")
    datasets: Any = importlib.import_module("datasets")
    rows = datasets.load_dataset(dataset, subset or None, split=split)
    if missing := [column for column in columns if column not in rows.column_names]:
        found = ", ".join(rows.column_names)
        raise SpecError(
            f"environment.params.dataset = '{dataset}': '{split}' has no column {' and '.join(missing)}; found: {found}"
        )
    return rows.to_list()
