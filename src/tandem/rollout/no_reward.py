"""Say why nothing can be learned from the first answers of a run, before many steps are spent on them.

A run learns nothing while all answers to the same task earn the same; `reward_reasons.py` finds the likely cause.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

from tandem.errors import EpisodeFailed
from tandem.obs.claims import answers
from tandem.rollout.reward_reasons import NoReward, likely_reason
from tandem.types import Group, Task, Trajectory

_ENOUGH_AFTER_S, _FEW = 40.0, 8  # after so long, so many answers are enough
_MOST, _KEPT = 64, 64  # answers to wait for, and to keep


class RewardWatch:
    """Watches the first groups of a run and reports once if nothing can be learned from them. `keep`: whether the
    algorithm trains on a group. `enough`: answers of one step. `say` gets the reason, and the whole text for people."""

    def __init__(
        self,
        say: Callable[[NoReward, str], None],
        keep: Callable[[Group], bool],
        *,
        enough: int,
        max_tokens: int,
        begins: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begins`: the run begins here. A resumed run reports nothing, but knows the reason when it ends."""
        self._say, self._keep, self._enough = say, keep, min(enough, _MOST)
        self._max_tokens, self._clock = max_tokens, clock
        self._started = clock()
        self._samples: deque[tuple[Task, Trajectory]] = deque(maxlen=_KEPT)
        self._failures: list[EpisodeFailed] = []
        self._groups = 0
        self._watching, self._learns = begins, False

    def played(self, task: Task, group: Group) -> None:
        """Note a group that was played to its end."""
        self._samples.extend((task, trajectory) for trajectory in group)
        self._groups += 1
        # An algorithm without siblings keeps groups of equal rewards, too, and compares them with each other.
        self._learns = self._keep(group) and len({played.reward for _, played in self._samples}) > 1
        self._watching = self._watching and not self._learns
        few = self._clock() - self._started > _ENOUGH_AFTER_S and len(self._samples) >= _FEW
        if self._watching and (len(self._samples) >= self._enough or few):
            self._report()

    def failed(self, failure: EpisodeFailed) -> None:
        """Note a group whose episode failed."""
        self._failures = [*self._failures, failure][-_KEPT:]
        if self._watching and len(self._failures) >= 2 and len(self._failures) > self._groups:
            self._report()

    def reason(self) -> str:
        """Return the likely reason of the latest answers as a sentence; empty if something could be learned from their
        rewards."""
        found = self._found()
        return f"likely {found.kind}: {found.text}" if found else ""

    def _report(self) -> None:
        self._watching = False
        if (found := self._found()) is not None:
            self._say(found, self._told(found))

    def _found(self) -> NoReward | None:
        found = likely_reason(self._samples, self._failures, max_tokens=self._max_tokens)
        earned: dict[str, set[float]] = defaultdict(set)
        for task, played in self._samples:
            earned[task.id].add(played.reward)
        if found is not None or not earned or self._learns or max(map(len, earned.values())) > 1:
            return found
        return NoReward(
            "same reward",
            "answers to the same task earn the same, and other tasks earn something else: the scorer does not look at "
            "the answers, or each task is always solved or never; a run learns from differences between siblings",
        )

    def _told(self, found: NoReward) -> str:
        played = [trajectory for _, trajectory in self._samples]
        if not played:
            return (
                f"nothing to learn from yet: {len(self._failures)} episodes failed. Likely {found.kind}: {found.text}"
            )
        rewards = sorted({each.reward for each in played})
        earned = f"all of the first {len(played)} answers earned {rewards[0]:g}"
        if len(rewards) > 1:
            earned = f"the first {len(played)} answers earned {rewards[0]:g} to {rewards[-1]:g}, equal in each task"
        return (
            f"nothing to learn from yet: {earned}. Likely {found.kind}: {found.text}. Some of them:\n{answers(played)}"
        )
