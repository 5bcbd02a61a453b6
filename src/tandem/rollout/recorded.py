"""Recorded conversations as a producer: supervised training goes around the same loop."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.protocols import RolloutStore
from tandem.rollout.producer import task_order
from tandem.rollout.recorder import Renders
from tandem.types import NO_VERSION, Message, Metrics, Trajectory


def record(renderer: Renders, messages: Sequence[Message], name: str) -> Trajectory:
    """A conversation as a trajectory: the loss counts the assistant's tokens and nothing else."""
    ids, trained = renderer.conversation(messages)
    nothing = len(ids)
    return Trajectory(
        ids, trained, [0.0] * nothing, [NO_VERSION] * nothing, status="recorded", task_id=name, messages=list(messages)
    )


class RecordedProducer:
    """Each recording once an epoch, every epoch in a new order; every recording is a group of its own."""

    def __init__(self, trajectories: Sequence[Trajectory], store: RolloutStore, *, seed: int) -> None:
        self._trajectories, self._store = trajectories, store
        self._which = task_order(len(trajectories), seed)

    async def run(self) -> None:
        while True:
            ticket = await self._store.admit()
            await self._store.put(ticket, [self._trajectories[self._which(ticket.order)]])

    def drain_metrics(self) -> Metrics:
        return {}
