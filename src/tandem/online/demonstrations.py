"""The prompt that shows a demonstration, for the model that is to judge by it (algo/self_distill.py)."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.types import Message

_SHOWN = """\
Here is an example of a good answer to what comes next:

{answer}

Now answer it yourself, in your own words."""


def judge_messages(context: Sequence[Message], demonstration: str) -> list[Message]:
    """The same conversation with the demonstration in its system message. All else stays as it is: only the prompt
    grows, and the answer's tokens are the same in both."""
    shown = _SHOWN.format(answer=demonstration)
    if context and context[0].get("role") == "system":
        first = {**context[0], "content": f"{context[0].get('content', '')}\n\n{shown}"}
        return [first, *context[1:]]
    return [{"role": "system", "content": shown}, *context]
