"""A producer that puts recorded conversations into the store, so that supervised training uses the same loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.io.image_parts import has_images
from tandem.protocols import RolloutStore
from tandem.rollout.producer import task_order
from tandem.rollout.recorder import RecorderRenderer
from tandem.types import NO_VERSION, Group, Message, Metrics, Trajectory


def record(
    renderer: RecorderRenderer, messages: Sequence[Message], name: str, tools: Sequence[Mapping[str, Any]] = ()
) -> Trajectory:
    """Turn a conversation into a trajectory; only the assistant's tokens are trained. `tools`: those it was offered."""
    ids, trained = renderer.conversation(messages, tools) if tools else renderer.conversation(messages)
    length = len(ids)
    return Trajectory(
        ids, trained, [0.0] * length, [NO_VERSION] * length, status="recorded", task_id=name, messages=list(messages),
        images=renderer.placed(messages, ids) if has_images(messages) else [],
    )  # fmt: skip


def record_pair(
    renderer: RecorderRenderer,
    prompt: Sequence[Message],
    chosen: Sequence[Message],
    rejected: Sequence[Message],
    name: str,
) -> Group:
    """Turn two answers to one prompt into a group, the better one first. No token of the prompt is trained, not even
    the assistant's."""
    return [
        record_answer(renderer, prompt, answer, reward, name) for answer, reward in ((chosen, 1.0), (rejected, 0.0))
    ]


def record_answer(
    renderer: RecorderRenderer, prompt: Sequence[Message], answer: Sequence[Message], reward: float, name: str
) -> Trajectory:
    """Turn an answer with its reward into a trajectory. No token of the prompt is trained, not even the assistant's."""
    answer_begins = len(renderer.conversation(prompt)[0])  # through the prompt's last assistant turn; 0 if it has none
    trajectory = record(renderer, [*prompt, *answer], name)
    trajectory.trained[:answer_begins] = [False] * answer_begins
    trajectory.reward = reward
    return trajectory


def with_mismatched(answers: Sequence[Trajectory], longest: int) -> list[Group]:
    """Return each answer with a mismatched one: its prompt, followed by an answer to another prompt. Such answers are
    cut at `longest` tokens."""
    begins = [answer.trained.index(True) for answer in answers]
    prompts = [answer.ids[:begin] for answer, begin in zip(answers, begins, strict=True)]
    groups: list[Group] = []
    for number, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
        count = len(answers)
        others = [(number + count // 2 + step) % count for step in range(count)]
        other = next((each for each in others if prompts[each] != prompt), others[0])
        begin = begins[other]
        ids = [*prompt, *answers[other].ids[begin:]][:longest]
        trained = [*[False] * len(prompt), *answers[other].trained[begin:]][:longest]
        unsampled = [0.0] * len(ids), [NO_VERSION] * len(ids)
        groups.append([answer, Trajectory(ids, trained, *unsampled, status="recorded", task_id=answer.task_id)])
    return groups


class RecordedProducer:
    """Put each group once per epoch, each epoch in a new order."""

    def __init__(self, groups: Sequence[Group], store: RolloutStore, *, seed: int) -> None:
        self._groups, self._store = groups, store
        self._group_index = task_order(len(groups), seed)

    async def run(self) -> None:
        while True:
            ticket = await self._store.admit()
            await self._store.put(ticket, self._groups[self._group_index(ticket.order)])

    def drain_metrics(self) -> Metrics:
        return {}

    def state(self) -> dict[str, Any]:
        """Return no state: the store knows which group is next."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass
