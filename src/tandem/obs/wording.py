"""What a run may claim, in words: the verdict with its numbers, and what it leaves open."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tandem.obs.history import by_loss, number

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def headline(status: Mapping[str, Any]) -> str:
    """One sentence: what happened, from where to where."""
    state, name = str(status.get("state", "unknown")), str(status.get("verdict", ""))
    before, after = ends(status)
    if state != "succeeded":
        steps = f"{status.get('steps_done', 0)} of {status.get('steps_total', '?')} steps"
        beginning = {"running": "Still running", "queued": "Not started", "failed": "Failed", "cancelled": "Cancelled"}
        return f"{beginning.get(state, f'State {state}')}: {steps} done."
    if before is None or after is None:
        return f"Finished after {status.get('steps_done', '?')} steps. It was not evaluated, so there is no verdict."
    what = "held-out loss" if by_loss(status) else "held-out accuracy"
    since = "before RL" if "before_rl" in status["eval"] else "before training"
    verb = "rose" if after > before else "fell" if after < before else "stayed"
    if name == "unchanged" or verb == "stayed":
        return f"Unchanged: {what} was {figure(status, before)} {since} and {figure(status, after)} after it."
    moved = f"{verb} from {figure(status, before)} {since} to {figure(status, after)} after it"
    return f"{name.capitalize()}: {what} {moved}." if name else f"Finished: {what} {moved}."


def evidence(status: Mapping[str, Any]) -> str:
    """The difference, its interval, and over how many tasks; empty where there was no evaluation."""
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
    """What the verdict does not say."""
    if not evidence(status):
        return ""
    tasks = size(status) or "held-out tasks"
    if status.get("verdict") == "unchanged":
        return (
            f"This says that these {tasks} cannot tell the model before from the one after. It does not say that "
            "the two are equal: a smaller difference may be there, and more held-out tasks would narrow the interval."
        )
    return (
        f"This is about these {tasks} and this one run. It does not say how the model does on anything else, nor what "
        "another seed would give: the interval covers the choice of tasks, not the luck of training."
    )


def ends(status: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The two numbers that were compared: RL is judged against the model that it started from."""
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
    """`+81.6 to +89.8 points`; empty where there is none."""
    bounds = interval(status)
    return f"{change(status, bounds[0]).removesuffix(' points')} to {change(status, bounds[1])}" if bounds else ""


def figure(status: Mapping[str, Any], value: float) -> str:
    return f"{value:.3f}" if by_loss(status) else f"{value * 100:.1f} %"


def change(status: Mapping[str, Any], value: float) -> str:
    text = f"{value:+.3f}" if by_loss(status) else f"{value * 100:+.1f} points"
    return text.replace("-", "−")


def size(status: Mapping[str, Any]) -> str:
    found = status.get("eval")
    if not isinstance(found, Mapping):
        return ""
    for field, noun in (("tasks", "tasks"), ("examples", "conversations")):
        if count := number(found.get(field)):
            if by_loss(status):
                noun = "pairs of answers" if status.get("recipe") == "preference" else "conversations"
            return f"{count:,.0f} {noun}"
    return ""


def printable(text: str) -> str:
    """Without control characters: what a model wrote must not steer the terminal."""
    return _CONTROL.sub("", text)
