"""Several environments in one run, mixed by weight: `[[environment]]` in a spec."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

from tandem.env.builtin.split import SPLITS
from tandem.errors import SpecError
from tandem.protocols import Chat, Demonstrator, Environment, Reporting
from tandem.spec.environment import part_labels
from tandem.types import Message, Outcome, Task

MOST_TASKS = 1_000_000
"""Of an epoch: the limit of environments in workers."""
_PART, _TASK = "mix part", "mix task"


@dataclass(frozen=True, slots=True)
class MixPart:
    label: str
    """Its name in metrics and task ids."""
    weight: float
    """Its share of the tasks; all weights add up to 1."""
    environment: Environment


class Mix:
    """An epoch has each part's training tasks in the shares of the weights: the tasks of the part with the most for its
    weight once, those of the others again."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        """`parts`: tables with `name`, `params`, `weight` and `label`."""
        from tandem.env.load import load_environment  # it loads this class, too

        weights: list[float] = [part.get("weight", 1.0) for part in parts]
        total = sum(weights)
        labels = part_labels(parts)
        loaded = [load_environment(part["name"], part.get("params")) for part in parts]
        self._parts: list[MixPart] = [
            MixPart(label, weight / total, environment)
            for label, weight, environment in zip(labels, weights, loaded, strict=True)
        ]
        self.replies_first = all(getattr(each, "replies_first", False) is True for each in loaded)
        if all(isinstance(each, Demonstrator) for each in loaded):
            self.demonstrate = self._demonstrate

    @property
    def report(self) -> str:
        told = [
            (part.label, part.environment.report) for part in self._parts if isinstance(part.environment, Reporting)
        ]
        return "\n   ".join(f"{label}: {report}" for label, report in told)

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in SPLITS:
            raise SpecError(f"split = '{split}': an environment has {' and '.join(map(repr, SPLITS))}")
        return _MixedTasks(
            self._parts, [part.environment.tasks(split) for part in self._parts], repeat=split == "train"
        )

    async def run(self, task: Task, chat: Chat) -> Outcome:
        part = self._part(task)
        outcome = await part.environment.run(task.payload[_TASK], chat)
        if not isinstance(cast("object", outcome), Outcome):
            return outcome  # refused by the caller, as without a mix
        metrics = {f"{part.label}/{name}": value for name, value in outcome.metrics.items()}
        if "correct" in outcome.metrics:
            metrics["correct"] = outcome.metrics["correct"]
        return Outcome(outcome.reward, {**metrics, f"{part.label}/reward": outcome.reward})

    def _part(self, task: Task) -> MixPart:
        which: int = task.payload[_PART]
        return self._parts[which]

    def _demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        environment = self._part(task).environment
        assert isinstance(environment, Demonstrator), "only offered where every part demonstrates"
        return environment.demonstrate(task.payload[_TASK], rng)


class _MixedTasks(Sequence[Task]):
    """The tasks of all parts, made when they are asked for."""

    def __init__(self, parts: Sequence[MixPart], tasks: Sequence[Sequence[Task]], *, repeat: bool) -> None:
        """`repeat`: repeat tasks, so that each is there; otherwise leave some out, so that each is there once."""
        for part, each in zip(parts, tasks, strict=True):
            if not len(each):
                raise SpecError(f"environment: '{part.label}' has no tasks; each environment of a mix needs some")
        per_weight = [len(each) / part.weight for part, each in zip(parts, tasks, strict=True)]
        length = max(per_weight) if repeat else min(per_weight)
        if length > MOST_TASKS:
            most = parts[per_weight.index(length)]
            raise SpecError(
                f"environment: weight = {most.weight:.3g} of '{most.label}', as a share of all, makes an epoch of "
                f"{length:,.0f} tasks, and the limit is {MOST_TASKS:,}; raise its weight, or give it fewer tasks"
            )
        self._parts, self._tasks = parts, tasks
        counts = [max(1, round(length * part.weight)) for part in parts]
        self._counts = [count if repeat else min(count, len(each)) for count, each in zip(counts, tasks, strict=True)]
        self._ends = list(itertools.accumulate(self._counts))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect.bisect_right(self._ends, index)
        place = index - (self._ends[which] - self._counts[which])
        tasks = self._tasks[which]
        if self._counts[which] < len(tasks):  # spread over all of them
            place = place * len(tasks) // self._counts[which]
        round_, place = divmod(place, len(tasks))
        task = tasks[place]
        again = f"~{round_ + 1}" if round_ else ""
        return Task(f"{self._parts[which].label}/{task.id}{again}", task.messages, {_PART: which, _TASK: task})


def mean_by_part(task_ids: Sequence[str], scores: Sequence[float]) -> Mapping[str, float]:
    """Return the mean score of each part, by its label."""
    by_label: dict[str, list[float]] = {}
    for task_id, score in zip(task_ids, scores, strict=True):
        by_label.setdefault(task_id.partition("/")[0], []).append(score)
    return {label: sum(each) / len(each) for label, each in by_label.items()}
