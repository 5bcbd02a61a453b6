"""Recorded conversations as a producer: supervised training goes around the same loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.protocols import RolloutStore
from tandem.rollout.producer import task_order
from tandem.rollout.recorder import RecorderRenderer
from tandem.types import NO_VERSION, Group, Message, Metrics, Trajectory


def record(renderer: RecorderRenderer, messages: Sequence[Message], name: str) -> Trajectory:
    """A conversation as a trajectory: the loss counts the assistant's tokens and nothing else."""
    ids, trained = renderer.conversation(messages)
    nothing = len(ids)
    return Trajectory(
        ids, trained, [0.0] * nothing, [NO_VERSION] * nothing, status="recorded", task_id=name, messages=list(messages)
    )


def record_pair(
    renderer: RecorderRenderer,
    prompt: Sequence[Message],
    chosen: Sequence[Message],
    rejected: Sequence[Message],
    name: str,
) -> Group:
    """Two answers to one prompt, the better one first. Nothing of the prompt is trained, whoever said it."""
    answers_begin = len(renderer.conversation(prompt)[0])  # up to the assistant's last turn in it; 0 if it has none
    pair: Group = []
    for answer, reward in ((chosen, 1.0), (rejected, 0.0)):
        trajectory = record(renderer, [*prompt, *answer], name)
        trajectory.trained[:answers_begin] = [False] * answers_begin
        trajectory.reward = reward
        pair.append(trajectory)
    return pair


class RecordedProducer:
    """Each group once an epoch, every epoch in a new order."""

    def __init__(self, groups: Sequence[Group], store: RolloutStore, *, seed: int) -> None:
        self._groups, self._store = groups, store
        self._which = task_order(len(groups), seed)

    async def run(self) -> None:
        while True:
            ticket = await self._store.admit()
            await self._store.put(ticket, self._groups[self._which(ticket.order)])

    def drain_metrics(self) -> Metrics:
        return {}

    def state(self) -> dict[str, Any]:
        """Which comes next is the store's to know."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass
