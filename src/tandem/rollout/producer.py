"""Play groups of episodes and put them into the rollout store.

consumes: slots                  waits for: a slot, then the slowest sibling of a group
produces: groups, or drops with a reason; metrics of the groups played
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tandem.errors import EpisodeFailed, ImageError, TemplateError, TooManyFailures
from tandem.rollout.episode import Setting, play
from tandem.rollout.no_reward import RewardWatch
from tandem.types import Group, Metrics, Task, Ticket, Trajectory

_log = logging.getLogger(__name__)

_WINDOW = 100  # the share of failures is taken over this many groups
_MIN_SEEN = 20  # with fewer groups a share means nothing


class Tickets(Protocol):
    """The RolloutStore methods that a producer uses."""

    async def admit(self) -> Ticket: ...
    async def put(self, ticket: Ticket, group: Group) -> None: ...
    async def drop(self, ticket: Ticket, reason: str) -> None: ...


def task_order(num_tasks: int, seed: int) -> Callable[[int], int]:
    """Return a function from the n-th start to its task: each task once per epoch, each epoch in a new order."""
    shuffled: dict[int, list[int]] = {}

    def index(start: int) -> int:
        epoch, offset = divmod(start, num_tasks)
        if epoch not in shuffled:
            shuffled.clear()
            shuffled[epoch] = random.Random(f"{seed}:{epoch}").sample(range(num_tasks), num_tasks)
        return shuffled[epoch][offset]

    return index


class EnvironmentProducer:
    """Play groups of siblings on an environment's training tasks."""

    def __init__(
        self, setting: Setting, store: Tickets, keep: Callable[[Group], bool], *,
        group_size: int, seed: int, max_failed_share: float, max_replaced: int = 0, watch: RewardWatch | None = None,
    ) -> None:  # fmt: skip
        self._setting, self._store, self._keep = setting, store, keep
        self._tasks: Sequence[Task] = setting.environment.tasks("train")
        self._task_index = task_order(len(self._tasks), seed)
        self._group_size, self._seed, self._max_failed_share = group_size, seed, max_failed_share
        self._recent_failures: deque[bool] = deque(maxlen=_WINDOW)
        self._max_replaced, self._replaced_in_a_row = max_replaced, 0
        self._watch = watch
        self._played: list[Group] = []
        self._dropped: Counter[str] = Counter()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as playing:
            while True:
                ticket = await self._store.admit()
                playing.create_task(self._play_group(ticket), name=f"group-{ticket.order}")

    def drain_metrics(self) -> Metrics:
        """Return metrics of all groups that ended, dropped ones too: kept groups alone would flatter the policy."""
        groups, self._played = self._played, []
        dropped, self._dropped = self._dropped, Counter()
        metrics: Metrics = {f"groups/dropped/{reason}": float(count) for reason, count in sorted(dropped.items())}
        metrics |= {f"episodes/retried/{kind}": float(count) for kind, count in sorted(self._setting.retried.items())}
        self._setting.retried.clear()
        metrics["groups/dropped"] = float(sum(dropped.values()))
        return metrics | group_metrics(groups)

    def state(self) -> dict[str, Any]:
        return {"recent_failures": list(self._recent_failures), "replaced_in_a_row": self._replaced_in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._recent_failures.extend(state["recent_failures"])
        self._replaced_in_a_row = state["replaced_in_a_row"]

    async def _play_group(self, ticket: Ticket) -> None:
        task = self._tasks[self._task_index(ticket.order)]
        try:
            group = await self._siblings(task, ticket.order)
        except EpisodeFailed as failure:
            _log.warning("group %d failed: %s", ticket.order, failure)
            if self._watch is not None:
                self._watch.failed(failure)
            self._count_failure(failure)
            await self._drop(ticket, failure.kind)
            return
        self._recent_failures.append(False)
        self._played.append(group)
        if self._watch is not None:
            self._watch.played(task, group)
        keep = self._keep(group)
        if keep or self._replaced_in_a_row >= self._max_replaced:
            await self._store.put(ticket, group)
        else:
            await self._drop(ticket, "no_signal")
        self._replaced_in_a_row = 0 if keep else self._replaced_in_a_row + 1

    async def _siblings(self, task: Task, order: int) -> Group:
        try:
            task, opening_ids = self._setting.opened(task)
        except (TemplateError, ImageError) as error:
            raise EpisodeFailed("template", f"task {task.id}: {error}") from error
        # Seeds are far apart, so that no two of group, sibling and turn share one.
        seeds = [((self._seed * 1_000_003 + order) * 4096 + sibling) * 1024 for sibling in range(self._group_size)]

        async def episode(seed: int) -> Trajectory:
            try:
                return await play(self._setting, task, opening_ids, seed)
            except BaseException:
                for sibling in playing:  # at once: the next sibling to run would block as long as this one did
                    if sibling is not asyncio.current_task():
                        sibling.cancel()
                raise

        playing = [asyncio.ensure_future(episode(seed)) for seed in seeds]
        try:
            return list(await asyncio.gather(*playing))
        finally:
            await asyncio.gather(*playing, return_exceptions=True)  # no sibling may run on after its slot is freed

    async def _drop(self, ticket: Ticket, reason: str) -> None:
        self._dropped[reason] += 1
        await self._store.drop(ticket, reason)

    def _count_failure(self, failure: EpisodeFailed) -> None:
        self._recent_failures.append(True)
        failed, seen = sum(self._recent_failures), len(self._recent_failures)
        if failed > self._max_failed_share * max(seen, _MIN_SEEN):
            raise TooManyFailures(
                f"environment: {failed} of the last {seen} groups failed, more than environment.max_failed_share = "
                f"{self._max_failed_share:g} allows; the last one: {failure}"
            ) from failure


def group_metrics(groups: Sequence[Group]) -> Metrics:
    """Return metrics of played groups: reward, tokens, truncation, thinking, and the environment's own."""
    metrics: Metrics = {"groups/played": float(len(groups))}
    played = [trajectory for group in groups for trajectory in group]
    if not played:
        return metrics
    rewards = [trajectory.reward for trajectory in played]
    metrics["reward/mean"] = statistics.fmean(rewards)
    metrics["reward/std"] = statistics.pstdev(rewards)
    if any(trajectory.shaping for trajectory in played):
        metrics["reward/shaping"] = statistics.fmean(trajectory.shaping for trajectory in played)
    metrics["tokens/sampled"] = float(sum(trajectory.num_trained for trajectory in played))
    metrics["tokens/per_sample"] = statistics.fmean(trajectory.num_trained for trajectory in played)
    metrics["episode/truncated"] = statistics.fmean(trajectory.status == "truncated" for trajectory in played)
    if any(trajectory.thinking_tokens or trajectory.unclosed for trajectory in played):
        metrics["thinking/tokens"] = statistics.fmean(trajectory.thinking_tokens for trajectory in played)
        metrics["thinking/unclosed"] = statistics.fmean(trajectory.unclosed for trajectory in played)
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in played:
        for name, value in trajectory.metrics.items():
            by_name[name].append(value)
    return metrics | {f"env/{name}": statistics.fmean(values) for name, values in sorted(by_name.items())}
