"""Samples for self-distillation (algo/self_distill.py): answers of the served model, and the judge that sees the
demonstration.

A job's group holds the demonstrated turn twice: after its context, and after the judge's prompt, which adds the
demonstration. The served model samples answers to the context; the trainer gets each answer after both prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tandem.online.messages import Sequence1
from tandem.protocols import Engine
from tandem.types import NO_VERSION, Group, Message, Sampling, Trajectory

ANSWERS = 4
"""Sampled for each demonstration."""

_SHOWN = """\
Here is an example of a good answer to what comes next:

{answer}

Now answer it yourself, in your own words."""


def judge_messages(context: Sequence[Message], demonstration: str) -> list[Message]:
    """Return the conversation with the demonstration added to its system message. Nothing else changes, so the answer
    has the same tokens after both prompts."""
    shown = _SHOWN.format(answer=demonstration)
    if context and context[0].get("role") == "system":
        first = {**context[0], "content": f"{context[0].get('content', '')}\n\n{shown}"}
        return [first, *context[1:]]
    return [{"role": "system", "content": shown}, *context]


def most_tokens(demonstrated: int) -> int:
    """Return the most tokens of an answer to a demonstration of so many tokens."""
    return 2 * demonstrated + 8


async def sample_answers(engine: Engine, groups: Sequence[Sequence[Sequence1]]) -> list[list[Sequence1]]:
    """Sample answers to each demonstration's context. Return for each all answers after the context, then the same
    answers after the judge's prompt."""
    return list(await asyncio.gather(*(_answers(engine, number, *pair) for number, pair in enumerate(groups))))


async def _answers(engine: Engine, number: int, shown: Sequence1, judged: Sequence1) -> list[Sequence1]:
    prompt, judge_prompt = shown.ids[: shown.first], judged.ids[: judged.first]
    limit = most_tokens(len(shown.ids) - shown.first)
    seeds = range(number * ANSWERS, (number + 1) * ANSWERS)
    answers = await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=limit, seed=seed)) for seed in seeds))
    after: list[Sequence1] = []
    for context in (prompt, judge_prompt):
        for answer in answers:
            logprobs = [0.0] * len(context) + answer.logprobs
            versions = [NO_VERSION] * len(context) + answer.versions
            trained = "1" * len(answer.ids)
            after.append(Sequence1([*context, *answer.ids], len(context), trained, 0.0, logprobs, versions))
    return after


class JudgedAnswers:
    """The answers of such groups, each as a group of its own, with the judge's logprobs of its tokens. They are
    computed when this is made, before the first step."""

    def __init__(self, groups: Sequence[Group], score: Callable[[Sequence[int], int], list[float]]) -> None:
        self.groups: list[Group] = []
        self._logprobs: dict[str, list[float]] = {}
        for group in groups:
            count = len(group) // 2
            for number, (own, judged) in enumerate(zip(group[:count], group[count:], strict=True)):
                own.task_id = f"{own.task_id}:{number}"
                self._logprobs[own.task_id] = score(judged.ids, judged.trained.index(True))
                self.groups.append([own])

    def __call__(self, trajectory: Trajectory) -> Sequence[float]:
        return self._logprobs[trajectory.task_id]
