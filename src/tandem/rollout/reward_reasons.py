"""Find the likely reason why all answers earn the same, from the answers, their tasks and the failures of episodes.

Usually it is not the model's ability: the scorer reads another format than the prompt asks for, or another column than
the one with the answer; answers are cut off, or the end of a turn is never sampled. The reason is a guess, and is said
as one. The checks stand in the order in which they are made: what shows itself in the answers first, ability last.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tandem.env.expected import expected_of
from tandem.errors import EpisodeFailed
from tandem.types import Task, Trajectory, text_of

_OFTEN, _SOMETIMES = 0.5, 0.2  # shares of answers
_AGREED, _COMMON = 0.6, 0.34  # share of a task's answers that hold a word, and of tasks where that word says nothing
_FEW_TASKS, _FEW_SIBLINGS = 4, 3
_FEW_ENDED = 4
_LONG = 8  # words of an expected answer
_ENDING = 600  # characters at the end of an answer in which repetitions are looked for

_REPEATS = re.compile(r"(.{2,100}?)\1{2,}.{0,100}\Z", re.DOTALL)
_NEXT_TURN = re.compile(r"(?im)^\W{0,4}(?:user|human|assistant|system|question|q)\b\W{0,4}(?:$|:)")
_ROLE = re.compile(r"\A\W{0,4}(?:assistant|user|system|model)\b\W|<\|\w+\|>|\[/?INST\]|<(?:start|end)_of_turn>")
_WORD = re.compile(r"\d[\d.,]*\d|\w+")
_DIGIT = re.compile(r"\d")
_MARKERS = {
    "a tag": re.compile(r"<([A-Za-z_]+)>"), "\\boxed{}": re.compile(r"(\\boxed)"), "####": re.compile(r"(####)"),
    "a code block": re.compile(r"(```)"), "double brackets": re.compile(r"(\[\[)"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoReward:
    """The likely reason why all answers earned the same."""

    kind: str
    """In a word: scorer, thinking, empty, same reward, template, case, parser, end of turn, length, format, column,
    same answer, answer key, difficulty."""
    text: str
    """What shows it, and the way out."""


@dataclass(frozen=True)
class _Sample:
    task: Task
    trajectory: Trajectory

    @cached_property
    def text(self) -> str:
        said = [message.get("content") for message in self.trajectory.messages if message.get("role") == "assistant"]
        return str(said[-1] or "") if said else ""

    @cached_property
    def prompt(self) -> str:
        return " ".join(text_of(message.get("content")) for message in self.task.messages)

    @cached_property
    def wanted(self) -> str:
        """The task's own answer, if it is not already in the prompt."""
        answers = expected_of(self.task).answers().values()
        return next((text for text in answers if text and not _holds(self.prompt, text)), "")

    @cached_property
    def unread(self) -> dict[str, str]:
        """The row's other columns that are not in the prompt."""
        expected = expected_of(self.task)
        answers, texts = expected.answers(), expected.texts()
        return {name: text for name, text in texts.items() if text and name not in answers and text not in self.prompt}


class _Answers:
    """All answers, and what several checks ask of them."""

    def __init__(self, samples: Sequence[_Sample], max_tokens: int) -> None:
        self.all, self.max_tokens = samples, max_tokens
        self.known = [each for each in samples if each.wanted]
        self.right = [each for each in self.known if _holds(each.text, each.wanted)]
        self.by_task: dict[str, list[_Sample]] = defaultdict(list)
        for each in samples:
            self.by_task[each.task.id].append(each)

    @property
    def reward(self) -> float:
        return self.all[0].trajectory.reward

    def often(self, count: int) -> bool:
        return count >= _OFTEN * len(self.all)

    def of(self, count: int) -> str:
        return f"{count} of {len(self.all)} answers"


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
    answers = _Answers(samples, max_tokens)
    ended = _Answers([each for each in samples if each.trajectory.status != "truncated"], max_tokens)
    checks = [(check, answers) for check in (_thinking, _empty, _rewarded, _template)]
    if len(ended.all) >= _FEW_ENDED:  # an answer that ended tells more than others that were cut off
        checks += [(check, ended) for check in (_format, _unseen, _column, _answer_key)]
    checks += [(check, answers) for check in (_cut_off, _format, _unseen, _column, _same_answer, _answer_key)]
    for check, of in checks:
        if (found := check(of)) is not None:
            return found
    return NoReward(
        "difficulty",
        "the answers end, and none holds what its task expects: the tasks may be too hard for this model; take easier "
        "ones, warm it up ([warmup]), reward parts of an answer, or see its base rate by `tandem env check`",
    )


def _thinking(answers: _Answers) -> NoReward | None:
    count = sum(each.trajectory.unclosed for each in answers.all)
    if not answers.often(count):
        return None
    return NoReward(
        "thinking",
        f"{answers.of(count)} never end their thought within {answers.max_tokens} tokens, so they say nothing; "
        "raise train.max_tokens, or set model.thinking = false",
    )


def _empty(answers: _Answers) -> NoReward | None:
    count = sum(not each.text.strip() for each in answers.all)
    if not answers.often(count):
        return None
    return NoReward(
        "empty",
        f"{answers.of(count)} are empty: the model ends its turn at once, or begins with a stop string; is the chat "
        "template the model's own (model.path), and is the prompt a user's turn?",
    )


def _rewarded(answers: _Answers) -> NoReward | None:
    if answers.reward <= 0:
        return None
    kinds = len({each.text for each in answers.all})
    which = f"{kinds} different" if kinds > 1 else "equal"
    return NoReward(
        "same reward",
        f"{which} answers earned the same {answers.reward:g}: the scorer does not look at them, or the tasks "
        "are solved already; a run learns from differences between siblings",
    )


def _template(answers: _Answers) -> NoReward | None:
    count = sum(bool(_ROLE.search(each.text)) for each in answers.all)
    if not answers.often(count):
        return None
    return NoReward(
        "template",
        f"{answers.of(count)} begin with the name of a role or hold a template's marks: the chat template is not the "
        "one that the model was trained with, or does not open the assistant's turn (add_generation_prompt)",
    )


def _unseen(answers: _Answers) -> NoReward | None:
    """The answers hold what is right, and the scorer did not see it."""
    if not answers.right or len(answers.right) < _SOMETIMES * len(answers.known):
        return None
    right, known, earned = answers.right, answers.known, f"and earned {answers.reward:g}"
    shown = right[0].wanted[:40]
    exact = [each for each in right if each.text.strip() == each.wanted]
    if len(exact) >= _OFTEN * len(right):
        return NoReward(
            "scorer",
            f"{len(exact)} of {len(known)} answers are what their task expects, as '{exact[0].wanted[:40]}', {earned}: "
            "the scorer compares with something else, such as another column, or a number with a text; try it by "
            "`tandem env try`",
        )
    if sum(each.wanted in each.text for each in right) < _SOMETIMES * len(right):
        return NoReward(
            "case",
            f"{len(right)} of {len(known)} answers hold what their task expects, as '{shown}', in another case, "
            f"{earned}: compare without case (`ignore_case = true` of exact), or tell the model the case",
        )
    return NoReward(
        "parser",
        f"{len(right)} of {len(known)} answers hold what their task expects, as '{shown}', within a sentence, "
        f"{earned}: the scorer does not find the answer in the reply; let it look for the last number or word, or tell "
        "the model the format",
    )


def _cut_off(answers: _Answers) -> NoReward | None:
    cut = [each for each in answers.all if each.trajectory.status == "truncated"]
    if not answers.often(len(cut)) or answers.often(len(answers.right)):  # cut, but after what is right
        return None
    runs_on = sum(bool(_REPEATS.search(each.text[-_ENDING:]) or _NEXT_TURN.search(each.text)) for each in cut)
    if runs_on >= _OFTEN * len(cut):
        return NoReward(
            "end of turn",
            f"{answers.of(len(cut))} reach {answers.max_tokens} tokens, and {runs_on} of these repeat themselves "
            "or write the next turn: the end of a turn is never sampled; take a model that was trained to chat, or "
            "warm it up with conversations ([warmup])",
        )
    return NoReward(
        "length",
        f"{answers.of(len(cut))} are cut off at {answers.max_tokens} tokens before they are done; raise "
        "train.max_tokens, or ask for short answers",
    )


def _format(answers: _Answers) -> NoReward | None:
    for name, marker in _MARKERS.items():
        asked = [(each, found) for each in answers.all if (found := set(marker.findall(each.prompt)))]
        if not answers.often(len(asked)):
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


def _column(answers: _Answers) -> NoReward | None:
    """The prompt, or what the scorer reads, comes from a wrong column."""
    prompts = {each.prompt for each in answers.all}
    rows = sum(bool(each.unread) for each in answers.all)
    if answers.often(rows) and len(answers.by_task) >= _FEW_TASKS and 2 * len(prompts) <= len(answers.by_task):
        return NoReward(
            "column",
            f"{len(answers.by_task)} tasks have {len(prompts)} different prompts, as "
            f"'{answers.all[0].prompt[-60:]}': does this column hold the question? Map another by "
            "`columns = { prompt = ... }`",
        )
    counts = Counter(name for each in answers.all for name, text in each.unread.items() if _holds(each.text, text))
    for name, count in counts.most_common(1):
        if count >= _SOMETIMES * len(answers.all):
            read = ", ".join(expected_of(answers.all[0].task).answers()) or "another"
            return NoReward(
                "column",
                f"{answers.of(count)} hold what stands in the column '{name}', and the scorer reads '{read}'; name the "
                f'right one, as in {{ fn = ..., answer = "{name}" }}',
            )
    wordy = [each for each in answers.known if len(each.wanted.split()) >= _LONG]
    if wordy and len(wordy) >= _OFTEN * len(answers.known):
        spoken = statistics.median(len(each.text.split()) for each in wordy)
        return NoReward(
            "column",
            f"the scorer compares with texts of {_LONG} words and more, as '{wordy[0].wanted[:60]}', and answers have "
            f"{spoken:g}: does that column hold an explanation? Compare with its last number, or with another column",
        )
    if not any(_DIGIT.search(each.wanted) for each in answers.known) and answers.often(
        sum(bool(each.wanted and _DIGIT.search(each.text) and _DIGIT.search(each.prompt)) for each in answers.all)
    ):
        return NoReward(
            "column",
            f"questions and answers are about numbers, and the scorer compares with texts, as "
            f"'{answers.known[0].wanted[:40]}': does it read the right column?",
        )
    return None


def _same_answer(answers: _Answers) -> NoReward | None:
    if len({each.text for each in answers.all}) > 1 or len(answers.by_task) < 2:
        return None
    return NoReward(
        "same answer",
        "every answer to every task is the same; does the prompt hold the question, and is train.temperature above 0?",
    )


def _answer_key(answers: _Answers) -> NoReward | None:
    """Siblings agree on a word that answers to other tasks lack: the model knows something else than the key says."""
    groups = [group for group in answers.by_task.values() if len(group) >= _FEW_SIBLINGS]
    held = [_agreed(group) for group in groups]
    common = Counter(word for words in held for word in words)
    most = max(1, _COMMON * len(groups))
    agreed = [
        (word, group[0]) for words, group in zip(held, groups, strict=True) for word in words if common[word] <= most
    ]
    tasks = {sample.task.id for _, sample in agreed}
    if len(groups) < _FEW_TASKS or len(tasks) < _OFTEN * len(groups):
        return None
    word, sample = agreed[0]
    key = f", where '{sample.wanted[:40]}' is expected" if sample.wanted else ""
    return NoReward(
        "answer key",
        f"answers to the same task agree with each other in {len(tasks)} of {len(groups)} tasks, as on '{word}' for "
        f"'{sample.prompt[-60:]}'{key}: are the expected answers right, and those of their own rows? If they are, the "
        "tasks are too hard for this model",
    )


def _agreed(group: Sequence[_Sample]) -> set[str]:
    """Return the words of most of a task's answers that its prompt lacks."""
    asked = {word.lower() for word in _WORD.findall(group[0].prompt)}
    counts = Counter(word for each in group for word in {word.lower() for word in _WORD.findall(each.text)} - asked)
    return {word for word, count in counts.items() if count >= _AGREED * len(group)}


def _holds(text: str, wanted: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(wanted)}(?!\w|\.\d)", text, re.IGNORECASE) is not None
