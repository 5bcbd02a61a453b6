"""Demonstrations for self-distillation (algo/self_distill.py): the prompt that shows one, and answers without it.

A group of a job is the demonstrated turn twice, as it follows the context and as it follows the prompt that shows it.
The model that is served answers the first prompt some times; each answer goes to the trainer after both prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tandem.online.messages import Sequence1
from tandem.protocols import Engine
from tandem.types import NO_VERSION, Group, Message, Sampling, Trajectory

ANSWERS = 4
"""To each demonstration's context."""

_SHOWN = """\
Here is an example of a good answer to what comes next:

{answer}

Now answer it yourself, in your own words."""


def judge_messages(context: Sequence[Message], demonstration: str) -> list[Message]:
    """The same conversation with the demonstration in its system message. All else stays as it is: only the prompt
    grows, and the answer's tokens are the same in both."""
    shown = _SHOWN.format(answer=demonstration)
    if context and context[0].get("role") == "system":
        first = {**context[0], "content": f"{context[0].get('content', '')}\n\n{shown}"}
        return [first, *context[1:]]
    return [{"role": "system", "content": shown}, *context]


def most_tokens(demonstrated: int) -> int:
    """Of an answer, where so many were demonstrated."""
    return 2 * demonstrated + 8


async def answered(engine: Engine, groups: Sequence[Sequence[Sequence1]]) -> list[list[Sequence1]]:
    """For each demonstration, answers after the context that the model had, then the same after the judge's."""
    return list(await asyncio.gather(*(_answers(engine, number, *pair) for number, pair in enumerate(groups))))


async def _answers(engine: Engine, number: int, shown: Sequence1, judged: Sequence1) -> list[Sequence1]:
    prompt, judge = shown.ids[: shown.first], judged.ids[: judged.first]
    most = most_tokens(len(shown.ids) - shown.first)
    seeds = range(number * ANSWERS, (number + 1) * ANSWERS)
    said = await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=most, seed=seed)) for seed in seeds))
    after: list[Sequence1] = []
    for context in (prompt, judge):
        for answer in said:
            logprobs = [0.0] * len(context) + answer.logprobs
            versions = [NO_VERSION] * len(context) + answer.versions
            trained = "1" * len(answer.ids)
            after.append(Sequence1([*context, *answer.ids], len(context), trained, 0.0, logprobs, versions))
    return after


class JudgedAnswers:
    """The answers of such groups, each by itself, and what the judge says of its tokens: before the first step."""

    def __init__(self, groups: Sequence[Group], score: Callable[[Sequence[int], int], list[float]]) -> None:
        self.groups: list[Group] = []
        self._logprobs: dict[str, list[float]] = {}
        for group in groups:
            half = len(group) // 2
            for number, (own, judged) in enumerate(zip(group[:half], group[half:], strict=True)):
                own.task_id = f"{own.task_id}:{number}"
                self._logprobs[own.task_id] = score(judged.ids, judged.trained.index(True))
                self.groups.append([own])

    def __call__(self, trajectory: Trajectory) -> Sequence[float]:
        return self._logprobs[trajectory.task_id]
