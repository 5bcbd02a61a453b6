"""Problems of reasoning-gym, made by code and scored by the library's own rules.

    [environment]
    name = "reasoning_gym:chain_sum"

    [environment.params]
    config = { min_terms = 2, max_terms = 3 }

Problems are made with a seed. One question in eight is held out, the same in every process.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tandem.env.builtin.split import check_params, in_split
from tandem.errors import SpecError
from tandem.protocols import Chat
from tandem.types import Outcome, Task

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class ReasoningGym:
    """One reply to each problem; the reward is the library's score, from 0 to 1."""

    id: str
    """The name after the colon: a data set of reasoning-gym."""
    problems: int = 1000
    """Number of problems made; repeated questions are left out."""
    seed: int = 0
    """Seed of the problems."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the data set's own configuration, such as `max_terms`."""
    instruction: str = "Give the answer between <answer> and </answer>."
    """Text below each question. An answer between these tags is scored alone, otherwise the whole reply is."""

    replies_first: ClassVar[bool] = True
    """Each episode begins with the reply, so workers only score."""
    _entries: dict[str, dict[str, Any]] = field(init=False, repr=False, compare=False)
    _data: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_params(self, problems=(16, 1_000_000))
        object.__setattr__(self, "_data", self._made())
        entries = (self._data[index] for index in range(self.problems))
        object.__setattr__(self, "_entries", {entry["question"]: entry for entry in entries})

    def tasks(self, split: str) -> Sequence[Task]:
        numbered = enumerate(self._entries.items())
        return [
            self._task(f"{self.id}-{number}", question, entry["answer"])
            for number, (question, entry) in numbered
            if in_split(split, question)
        ]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        reply = await chat.reply()
        marked = _ANSWER.findall(reply.text)
        said = (marked[-1] if marked else reply.text).strip()
        score = float(self._data.score_answer(answer=said, entry=self._entries[task.payload["question"]]))
        return Outcome(score, {"correct": float(score >= 1.0), "score": score, "marked": float(bool(marked))})

    def _task(self, task_id: str, question: str, answer: object) -> Task:
        asked = f"{question}\n\n{self.instruction}" if self.instruction else question
        return Task(task_id, ({"role": "user", "content": asked},), {"question": question, "answer": answer})

    def _made(self) -> Any:
        name = f"environment.name = 'reasoning_gym:{self.id}'"
        if importlib.util.find_spec("reasoning_gym") is None:
            raise SpecError(f"{name}: needs reasoning-gym; pip install 'tandem-rl[reasoning-gym]'")
        library: Any = importlib.import_module("reasoning_gym")
        known = list(library.factory.DATASETS)
        if self.id not in known:
            close = difflib.get_close_matches(self.id, known, n=3)
            hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
            raise SpecError(f"{name}: unknown; {hint}reasoning-gym has {len(known)}: {', '.join(sorted(known))}")
        try:
            return library.create_dataset(self.id, size=self.problems, seed=self.seed, **self.config)
        except (TypeError, ValueError, AssertionError) as error:
            fields = ", ".join(
                sorted(library.factory.DATASETS[self.id][1].__dataclass_fields__.keys() - {"size", "seed"})
            )
            raise SpecError(
                f"environment.params.config = {self.config}: {error}; the fields of {self.id}: {fields}"
            ) from error
