"""What the assistant says to itself, told apart from what it says, while the text is still coming."""

from __future__ import annotations

THINK, END_THINK = "<think>", "</think>"


class ThoughtStream:
    """`opened`: the prompt ends within a thought already. Nothing that was given out has to be taken back."""

    def __init__(self, *, opened: bool) -> None:
        self._state = "thinking" if opened else "silent"
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """The new thought, and the new answer."""
        text, self._held = self._held + text, ""
        if self._state == "silent":
            begun = text.lstrip()
            if THINK.startswith(begun) and begun != THINK:
                self._held = text  # it may become a thought yet
                return "", ""
            self._state = "thinking" if begun.startswith(THINK) else "speaking"
            text = begun.removeprefix(THINK) if self._state == "thinking" else text
        thought = ""
        if self._state == "thinking":
            thought, closed, text = text.partition(END_THINK)
            if not closed:
                sure = len(thought) - _overlap(thought, END_THINK)
                self._held = thought[sure:]
                return thought[:sure], ""
            self._state = "closed"
        if self._state == "closed" and (text := text.lstrip()):
            self._state = "speaking"
        return thought, text

    def close(self) -> tuple[str, str]:
        """What was held back: nothing follows that could change it."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "thinking" else ("", held)


def _overlap(text: str, mark: str) -> int:
    """How much of the text's end is a beginning of the mark."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
