"""A producer that puts recorded conversations into the store, so that supervised training uses the same loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.protocols import RolloutStore
from tandem.rollout.producer import task_order
from tandem.rollout.recorder import RecorderRenderer
from tandem.types import NO_VERSION, Group, Message, Metrics, Trajectory


def record(renderer: RecorderRenderer, messages: Sequence[Message], name: str) -> Trajectory:
    """Turn a conversation into a trajectory; only the assistant's tokens are trained."""
    ids, trained = renderer.conversation(messages)
    length = len(ids)
    return Trajectory(
        ids, trained, [0.0] * length, [NO_VERSION] * length, status="recorded", task_id=name, messages=list(messages)
    )


def record_pair(
    renderer: RecorderRenderer,
    prompt: Sequence[Message],
    chosen: Sequence[Message],
    rejected: Sequence[Message],
    name: str,
) -> Group:
    """Turn two answers to one prompt into a group, the better one first. No token of the prompt is trained, not even
    the assistant's."""
    answers_begin = len(renderer.conversation(prompt)[0])  # through the prompt's last assistant turn; 0 if it has none
    pair: Group = []
    for answer, reward in ((chosen, 1.0), (rejected, 0.0)):
        trajectory = record(renderer, [*prompt, *answer], name)
        trajectory.trained[:answers_begin] = [False] * answers_begin
        trajectory.reward = reward
        pair.append(trajectory)
    return pair


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
