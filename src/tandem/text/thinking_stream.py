"""Separate thoughts from the answer in a streamed text."""

from __future__ import annotations

THINK, END_THINK = "<think>", "</think>"


class ThoughtStream:
    """Splits a stream; returned text never has to be taken back. `opened`: the prompt already opened a thought."""

    def __init__(self, *, opened: bool) -> None:
        self._state = "thinking" if opened else "silent"
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return new thought and new answer."""
        text, self._held = self._held + text, ""
        if self._state == "silent":
            begun = text.lstrip()
            if THINK.startswith(begun) and begun != THINK:
                self._held = text  # it may still become a thought
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
        """Return the held-back text at the end of the stream."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "thinking" else ("", held)


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that `mark` begins with."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
