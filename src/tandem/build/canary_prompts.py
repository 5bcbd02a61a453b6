"""The prompts of a model's canary: real text in the model's own chat template.

Random ids would measure the logprobs of text that no rollout contains, where 16 bits are least exact: a limit taken
from them is too wide to notice anything, or so near to healthy gaps that they exceed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tandem.errors import TandemError
from tandem.types import Message

if TYPE_CHECKING:
    from tandem.text.renderer import Renderer

_NUM_PROMPTS = 8
_LONGEST = 512  # tokens of one prompt; more would only cost time
_TEXTS = (
    "A train leaves the station at nine in the morning and travels for three hours at eighty kilometres an hour. Then "
    "it waits for twenty minutes and goes back at half the speed. Explain step by step when it arrives.",
    "Write two sentences about the sea in winter.",
    "What is the difference between a lake and a river? Answer as you would to a child of eight years.",
    "Name three uses of a wooden box, and say for each how large the box must be.",
    "Translate into French: the bread is on the table, and the window is open.",
    "Write a short function that adds up all even numbers of a list, and explain it.",
    "A friend is late for the third time this week. What could you say to her?",
    "List the first five prime numbers, with a word about each.",
)


def canary_prompts(
    renderer: Renderer, prompts: Sequence[Sequence[Message]], *, shortest: int, longest: int
) -> list[tuple[int, ...]]:
    """Return token ids of the run's `prompts`, filled up with built-in ones; the first has at least `shortest` tokens
    if one does. A longer one than `longest` keeps its end, where the template opens the answer."""
    most = max(1, min(longest, _LONGEST))
    found = list(dict.fromkeys(tuple(ids[-most:]) for ids in _rendered(renderer, prompts)))[:_NUM_PROMPTS]
    found.sort(key=lambda ids: len(ids) < shortest)  # a stable sort: otherwise the run's own stay in front
    return found


def _rendered(renderer: Renderer, prompts: Sequence[Sequence[Message]]) -> Iterator[list[int]]:
    for messages in prompts:
        with suppress(TandemError):  # the episodes of this task fail by the same error, and are counted there
            yield renderer.prompt(messages)
    for text in _TEXTS:
        yield renderer.prompt([{"role": "user", "content": text}])
