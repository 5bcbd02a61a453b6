"""The environment `prompts`: one answer to each prompt of a data set, scored by reward functions.

[environment]
name = "prompts"

[environment.params]
data = { path = "questions.csv", columns = { prompt = "question" } }
reward = ["score.py:correct", { fn = "score.py:brief", weight = 0.2 }]
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tandem.data.load import DataSplit
from tandem.env.builtin.split import SPLITS
from tandem.env.expected import Expected
from tandem.env.prompts.prompt_rows import PromptRow, data_spec, load_prompts
from tandem.env.prompts.reward_functions import GradedAnswer, Reward, load_rewards, total
from tandem.errors import SpecError
from tandem.protocols import Chat
from tandem.types import Message, Outcome, Task


@dataclass(frozen=True)
class Prompts:
    """The reward of an answer is the weighted sum of its functions; each function's value is a metric."""

    data: str | dict[str, Any]
    """A file, a directory or a data set by name; or a table with the fields of `[data]` (docs/data.md)."""
    reward: str | dict[str, Any] | list[str | dict[str, Any]]
    """One or several functions, by path (`score.py:correct`) or ready ones by name; tables add `weight` and `name`."""
    system: str = ""
    """A system message for every prompt that has none."""
    replies_first: ClassVar[bool] = True
    """Each episode begins with the reply, so workers only score."""
    _rows: DataSplit[PromptRow] = field(init=False, repr=False, compare=False)
    _rewards: list[Reward] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spec, rewards = data_spec(self.data), load_rewards(self.reward)
        rows = load_prompts(spec, self.system)
        for reward in rewards:
            reward.check(list(rows.train[0].columns))
        object.__setattr__(self, "_rewards", rewards)
        object.__setattr__(self, "_rows", rows)

    @property
    def report(self) -> str:
        """Which rows were read as what, and which were left out."""
        return self._rows.report.text()

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in SPLITS:
            raise SpecError(f"split = '{split}': an environment has {' and '.join(map(repr, SPLITS))}")
        rows = self._rows.train if split == "train" else self._rows.held_out
        read = (
            tuple(name for name in rows[0].columns if any(name in each.reads for each in self._rewards)) if rows else ()
        )
        return [
            Task(f"{split}-{row.row}", row.messages, {"row": row, "expected": Expected(row.columns, read)})
            for row in rows
        ]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        reply = await chat.reply()
        row: PromptRow = task.payload["row"]

        async def judge(question: str | Sequence[Message]) -> str:
            asked = [{"role": "user", "content": question}] if isinstance(question, str) else question
            return await chat.judge(asked)

        answer = GradedAnswer(reply.text, row.prompt, row.messages, row.columns, f"{row.source}:{row.row}", judge)
        reward, metrics = await total(self._rewards, answer)
        return Outcome(reward, metrics)

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """Return the row's `completion`, for a warm start."""
        row: PromptRow = task.payload["row"]
        shown = row.columns.get("completion")
        if not isinstance(shown, str) or not shown:
            raise SpecError(
                f"warmup.data.kind = 'demonstrations': {row.source}:{row.row} has no text in a column completion; map "
                "one by columns, or leave [warmup] out"
            )
        return [{"role": "assistant", "content": shown}]
