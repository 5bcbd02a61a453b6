"""Put a run's result into words: the verdict, its numbers, and what it does not show."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.obs.run_history import measure_of, number
from tandem.types import Measure, Trajectory

_ANSWER = 200  # characters of an answer to show
_MORE_TASKS = "eval.tasks; with questions of your own, params.data.eval_share"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def headline(status: Mapping[str, Any]) -> str:
    """Return the verdict in one sentence, with the numbers before and after."""
    state, name = str(status.get("state", "unknown")), str(status.get("verdict", ""))
    before, after = ends(status)
    if state != "succeeded":
        steps = f"{status.get('steps_done', 0)} of {status.get('steps_total', '?')} steps"
        beginning = {
            "running": "Still running", "queued": "Not started", "failed": "Failed", "cancelled": "Cancelled",
            "stopped": "Stopped",
        }  # fmt: skip
        return f"{beginning.get(state, f'State {state}')}: {steps} done."
    if before is None or after is None:
        steps = status.get("steps_done", "?")
        return f"Finished after {steps} steps. It was not evaluated, so there is no verdict.{_training_reward(status)}"
    what = f"held-out {measure_of(status)}"
    since = "before RL" if "before_rl" in status["eval"] else "before training"
    verb = "rose" if after > before else "fell" if after < before else "stayed"
    first, last = figure(status, before), figure(status, after)
    if first == last and verb != "stayed":
        first, last = f"{before:.7g}", f"{after:.7g}"
    moved = f"{verb} from {first} {since} to {last} after it"
    if name == "unchanged" or verb == "stayed":
        moved = f"was {first} {since} and {last} after it"
    return f"{name.capitalize() or 'Finished'}: {what} {moved}."


def _training_reward(status: Mapping[str, Any]) -> str:
    found = status.get("eval")
    told = found if isinstance(found, Mapping) else {}
    first, last = number(told.get("training_reward_first")), number(told.get("training_reward_last"))
    if first is None or last is None:
        return ""
    steps = f"{told.get('training_reward_steps')} steps"
    return f" The mean training reward was {first:.4g} over the first {steps} and {last:.4g} over the last {steps}."


def evidence(status: Mapping[str, Any]) -> str:
    """Return the difference, its interval and the number of tasks; empty without an evaluation."""
    before, after = ends(status)
    if before is None or after is None:
        return ""
    text = f"Difference {change(status, after - before)}"
    if interval(status):
        text += f"; {interval_name(status)} {interval_text(status)}"
    if count := size(status):
        text += f", paired over {count}"
    return text + "."


def caveat(status: Mapping[str, Any]) -> str:
    """Return a text about what the verdict does not show."""
    if not evidence(status):
        return ""
    tasks = size(status) or "held-out tasks"
    if status.get("verdict") == "undecided":
        why = f": {status['eval']['why']}" if status["eval"].get("why") else ""
        return (
            f"These {tasks} cannot show whether the model got better or worse, or stayed the same{why}. "
            f"Hold out more ({'data.eval_share or data.eval_path' if measure_of(status) == 'loss' else _MORE_TASKS})."
        )
    if status.get("verdict") == "unchanged":
        return (
            f"The interval contains no change that matters. This does not prove that both are equal: more than these "
            f"{tasks} could show a smaller difference."
        )
    return (
        f"This holds for these {tasks} and this one run. It does not say how good the model is at anything else, nor "
        "what another seed would give: the interval covers the choice of tasks, not the randomness of training."
    )


def ends(status: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the two compared numbers; RL is compared with the model that it started from."""
    found = status.get("eval")
    if not isinstance(found, Mapping):
        return None, None
    return number(found.get("before_rl", found.get("before"))), number(found.get("after"))


def interval(status: Mapping[str, Any]) -> tuple[float, float] | None:
    found = status.get("eval")
    bounds = found.get("interval") if isinstance(found, Mapping) else None
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        return None
    low, high = number(bounds[0]), number(bounds[1])
    return None if low is None or high is None else (low, high)


def interval_name(status: Mapping[str, Any]) -> str:
    level = number(status["eval"].get("confidence"))
    return f"{level * 100:g} % interval" if level else "interval"


def interval_text(status: Mapping[str, Any]) -> str:
    """Return the interval as `+81.6 to +89.8 points`; empty if there is none."""
    bounds = interval(status)
    return f"{change(status, bounds[0]).removesuffix(' points')} to {change(status, bounds[1])}" if bounds else ""


def figure(status: Mapping[str, Any], value: float) -> str:
    return figure_of(measure_of(status), value)


def figure_of(measure: Measure, value: float) -> str:
    """Return an accuracy as `97.1 %`; a loss or reward as a number."""
    if measure == "accuracy":
        return f"{value * 100:.1f} %"
    return f"{value:.3f}" if measure == "loss" else f"{value:.4g}"


def change(status: Mapping[str, Any], value: float) -> str:
    return change_of(measure_of(status), value).replace("-", "−")


def change_of(measure: Measure, value: float) -> str:
    """Return a change with its sign. One that three decimal places would show as 0 has two significant digits."""
    if measure == "accuracy":
        return f"{value * 100:+.1f} points"
    return f"{value:+.3f}" if abs(value) >= 0.001 or not value else f"{value:+.2g}"


def size(status: Mapping[str, Any]) -> str:
    found = status.get("eval")
    if not isinstance(found, Mapping):
        return ""
    for field, noun in (("tasks", "tasks"), ("examples", "conversations")):
        if count := number(found.get(field)):
            if measure_of(status) == "loss":
                noun = "pairs of answers" if status.get("recipe") == "preference" else "conversations"
                noun = "labelled answers" if status.get("algorithm") == "kto" else noun
            return f"{count:,.0f} {noun}"
    return ""


def answers(played: Sequence[Trajectory], count: int = 3) -> str:
    """Return the first answers to different tasks, and then others, with their rewards: the model's last turn of
    each."""
    firsts = dict[str, Trajectory]()
    others = [each for each in played if firsts.setdefault(each.task_id, each) is not each]
    return "\n".join(map(_answer, [*firsts.values(), *others][:count]))


def _answer(trajectory: Trajectory) -> str:
    said = [message.get("content") for message in trajectory.messages if message.get("role") == "assistant"]
    text = printable(str(said[-1] or "")) if said else ""
    left_out = f" and {len(text) - _ANSWER:,} characters more" if len(text) > _ANSWER else ""
    cut = ", cut off by the limit on tokens" if trajectory.status == "truncated" else ""
    shown = json.dumps(text[:_ANSWER], ensure_ascii=False)
    return f"   task {printable(trajectory.task_id)}: {shown}{left_out}{cut}: reward {trajectory.reward:g}"


def printable(text: str) -> str:
    """Remove control characters: text of a model must not control the terminal."""
    return _CONTROL.sub("", text)


def visible(text: str) -> str:
    """Return the text with control characters as in \\u001b, so that JSON keeps its meaning."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
