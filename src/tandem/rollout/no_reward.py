"""Say why the first answers of a run earn nothing, before many steps are spent on them.

A run whose answers all earn the same reward learns nothing. Usually the cause is not the model's ability: the scorer
reads another format than the prompt asks for, answers are cut off, or the end of a turn is never sampled. The likely
cause is found from the answers, their tasks and the failures of episodes. It is a guess, and is said as one.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import EpisodeFailed
from tandem.obs.claims import answers
from tandem.types import Group, Task, Trajectory

_ENOUGH_AFTER_S, _FEW = 40.0, 8  # after so long, so many answers are enough
_MOST, _KEPT = 64, 64  # answers to wait for, and to keep
_OFTEN, _SOMETIMES = 0.5, 0.2  # shares of answers
_ENDING = 600  # characters at the end of an answer in which repetitions are looked for

_REPEATS = re.compile(r"(.{2,100}?)\1{2,}.{0,100}\Z", re.DOTALL)
_NEXT_TURN = re.compile(r"(?im)^\W{0,4}(?:user|human|assistant|system|question|q)\b\W{0,4}(?:$|:)")
_MARKERS = {
    "a tag": re.compile(r"<([A-Za-z_]+)>"), "\\boxed{}": re.compile(r"(\\boxed)"), "####": re.compile(r"(####)"),
    "a code block": re.compile(r"(```)"), "double brackets": re.compile(r"(\[\[)"),
}  # fmt: skip
_EXPECTED = ("answer", "expected", "target", "solution", "ground_truth", "gold", "label", "result", "output")


@dataclass(frozen=True, slots=True)
class NoReward:
    """The likely reason why all answers earned the same."""

    kind: str
    """In a word: scorer, thinking, empty, end of turn, length, same reward, format, parser, same answer, difficulty."""
    text: str
    """What shows it, and the way out."""


@dataclass(frozen=True, slots=True)
class _Sample:
    task: Task
    trajectory: Trajectory

    @property
    def text(self) -> str:
        return _last_reply(self.trajectory)

    @property
    def prompt(self) -> str:
        return " ".join(str(message.get("content") or "") for message in self.task.messages)


class RewardWatch:
    """Watches the first groups of a run and reports once if their answers all earn the same. `enough`: answers of one
    step. `say` gets the reason, and the whole text for people."""

    def __init__(
        self,
        say: Callable[[NoReward, str], None],
        *,
        enough: int,
        max_tokens: int,
        begins: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begins`: the run begins here. A resumed run reports nothing, but knows the reason when it ends."""
        self._say, self._enough, self._max_tokens, self._clock = say, min(enough, _MOST), max_tokens, clock
        self._started = clock()
        self._samples: deque[_Sample] = deque(maxlen=_KEPT)
        self._failures: list[EpisodeFailed] = []
        self._groups = 0
        self._watching = begins

    def played(self, task: Task, group: Group) -> None:
        """Note a group that was played to its end."""
        self._samples.extend(_Sample(task, trajectory) for trajectory in group)
        self._groups += 1
        if self._watching and len({each.trajectory.reward for each in self._samples}) > 1:
            self._watching = False  # something is rewarded
        few = self._clock() - self._started > _ENOUGH_AFTER_S and len(self._samples) >= _FEW
        if self._watching and (len(self._samples) >= self._enough or few):
            self._report()

    def failed(self, failure: EpisodeFailed) -> None:
        """Note a group whose episode failed."""
        self._failures = [*self._failures, failure][-_KEPT:]
        if self._watching and len(self._failures) >= 2 and len(self._failures) > self._groups:
            self._report()

    def reason(self) -> str:
        """Return the likely reason of the latest answers as a sentence; empty if they earned different rewards."""
        found = self._found()
        return f"likely {found.kind}: {found.text}" if found else ""

    def _report(self) -> None:
        self._watching = False
        if (found := self._found()) is not None:
            self._say(found, self._told(found))

    def _found(self) -> NoReward | None:
        return likely_reason(
            [(each.task, each.trajectory) for each in self._samples], self._failures, max_tokens=self._max_tokens
        )

    def _told(self, found: NoReward) -> str:
        played = [each.trajectory for each in self._samples]
        if not played:
            return (
                f"nothing to learn from yet: {len(self._failures)} episodes failed. Likely {found.kind}: {found.text}"
            )
        earned = f"all of the first {len(played)} answers earned {played[0].reward:g}"
        return (
            f"nothing to learn from yet: {earned}. Likely {found.kind}: {found.text}. Three of them:\n{answers(played)}"
        )


def likely_reason(
    played: Iterable[tuple[Task, Trajectory]], failures: Sequence[EpisodeFailed] = (), *, max_tokens: int
) -> NoReward | None:
    """Return why all answers earned the same; None if they did not, or if there are none."""
    samples = [_Sample(*each) for each in played]
    if len(failures) >= 2 and len(failures) > len({each.task.id for each in samples}):
        kinds = Counter(failure.kind for failure in failures).most_common(1)
        text = f"{len(failures)} episodes failed, most of them with '{kinds[0][0]}'; the last: {failures[-1]}"
        return NoReward("scorer", f"{text}; mend it, and try it by `tandem env try`")
    if not samples or len({each.trajectory.reward for each in samples}) > 1:
        return None
    checks: tuple[Callable[[list[_Sample], int], NoReward | None], ...] = (
        _thinking, _empty, _cut_off, _rewarded, _format, _expected, _same_answer,
    )  # fmt: skip
    for check in checks:
        if (found := check(samples, max_tokens)) is not None:
            return found
    return NoReward(
        "difficulty",
        "the answers end, and none holds what its task expects: the tasks may be too hard for this model; take easier "
        "ones, warm it up ([warmup]), reward parts of an answer, or see its base rate by `tandem env check`",
    )


def _thinking(samples: list[_Sample], max_tokens: int) -> NoReward | None:
    count = sum(each.trajectory.unclosed for each in samples)
    if count < _OFTEN * len(samples):
        return None
    return NoReward(
        "thinking",
        f"{count} of {len(samples)} answers never end their thought within {max_tokens} tokens, so they say nothing; "
        "raise train.max_tokens, or set model.thinking = false",
    )


def _empty(samples: list[_Sample], max_tokens: int) -> NoReward | None:
    count = sum(not each.text.strip() for each in samples)
    if count < _OFTEN * len(samples):
        return None
    return NoReward(
        "empty",
        f"{count} of {len(samples)} answers are empty: the model ends its turn at once; is the chat template the "
        "model's own (model.path), and is the prompt a user's turn?",
    )


def _cut_off(samples: list[_Sample], max_tokens: int) -> NoReward | None:
    cut = [each for each in samples if each.trajectory.status == "truncated"]
    if len(cut) < _OFTEN * len(samples):
        return None
    runs_on = sum(bool(_REPEATS.search(each.text[-_ENDING:]) or _NEXT_TURN.search(each.text)) for each in cut)
    if runs_on >= _OFTEN * len(cut):
        return NoReward(
            "end of turn",
            f"{len(cut)} of {len(samples)} answers reach {max_tokens} tokens, and {runs_on} of these repeat themselves "
            "or write the next turn: the end of a turn is never sampled; take a model that was trained to chat, or "
            "warm it up with conversations ([warmup])",
        )
    return NoReward(
        "length",
        f"{len(cut)} of {len(samples)} answers are cut off at {max_tokens} tokens before they are done; raise "
        "train.max_tokens, or ask for short answers",
    )


def _rewarded(samples: list[_Sample], max_tokens: int) -> NoReward | None:
    reward = samples[0].trajectory.reward
    if reward <= 0:
        return None
    kinds = len({each.text for each in samples})
    return NoReward(
        "same reward",
        f"{kinds} different answers earned the same {reward:g}: the scorer does not look at them, or the tasks are "
        "solved already; a run learns from differences between siblings",
    )


def _format(samples: list[_Sample], max_tokens: int) -> NoReward | None:
    for name, marker in _MARKERS.items():
        asked = [(each, found) for each in samples if (found := set(marker.findall(each.prompt)))]
        if len(asked) < _OFTEN * len(samples):
            continue
        given = sum(bool(found & set(marker.findall(each.text))) for each, found in asked)
        if given < _SOMETIMES * len(asked):
            what = f"<{sorted(asked[0][1])[0]}>" if name == "a tag" else name
            return NoReward(
                "format",
                f"the prompt asks for {what}, and {given} of {len(asked)} answers have it; show the model an example "
                "in the prompt, reward the format by itself, or warm the model up ([warmup])",
            )
    return None


def _expected(samples: list[_Sample], max_tokens: int) -> NoReward | None:
    known = [(each, wanted) for each in samples if (wanted := _wanted(each))]
    found = [(each, wanted) for each, wanted in known if _holds(each.text, wanted)]
    if not known or len(found) < _SOMETIMES * len(known):
        return None
    each, wanted = found[0]
    if each.text.strip() == wanted:
        text = f"{len(found)} of {len(known)} answers are right or hold what is right, as '{wanted[:40]}'"
    else:
        text = (
            f"{len(found)} of {len(known)} answers hold what their task expects, as '{wanted[:40]}', within a sentence"
        )
    return NoReward(
        "parser",
        f"{text}, and earned {each.trajectory.reward:g}: the scorer does not find the answer in the reply; let it look "
        "for the last number or word, or tell the model the format",
    )


def _same_answer(samples: list[_Sample], max_tokens: int) -> NoReward | None:
    if len({each.text for each in samples}) > 1 or len({each.task.id for each in samples}) < 2:
        return None
    return NoReward(
        "same answer",
        "every answer to every task is the same; does the prompt hold the question, and is train.temperature above 0?",
    )


def _wanted(sample: _Sample) -> str:
    """Return the task's own answer from its payload, if it is not already in the prompt."""
    payload = sample.task.payload
    named: list[Any] = [payload[name] for name in _EXPECTED if name in payload]
    plain = [str(value).strip() for value in (named or payload.values()) if isinstance(value, str | int | float)]
    return next((text for text in plain if text and not _holds(sample.prompt, text)), "")


def _holds(text: str, wanted: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(wanted)}(?!\w|\.\d)", text, re.IGNORECASE) is not None


def _last_reply(trajectory: Trajectory) -> str:
    said = [message.get("content") for message in trajectory.messages if message.get("role") == "assistant"]
    return str(said[-1] or "") if said else ""
