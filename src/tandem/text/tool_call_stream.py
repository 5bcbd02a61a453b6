"""Separate tool calls from the answer in a streamed text."""

from __future__ import annotations

from tandem.io.tool_calls import END_TOOL_CALL, TOOL_CALL, parse_calls
from tandem.types import ToolCall

_TOLD_CHARS = 200


class CallStream:
    """Splits a stream; returned text never has to be taken back, and a call is returned once it is complete. White
    space around calls is dropped. An unreadable call stays in the text, and is added to `errors`."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._held = ""
        self._after_call = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text; return new text and newly completed calls."""
        self._held += text
        said: list[str] = []
        calls: list[ToolCall] = []
        while TOOL_CALL in self._held:
            before, _, rest = self._held.partition(TOOL_CALL)
            said.append(self._speak(before, then_a_mark=True))
            written, closed, after = rest.partition(END_TOOL_CALL)
            if not closed:
                self._held += TOOL_CALL + rest
                return "".join(said), calls
            whole = TOOL_CALL + written + END_TOOL_CALL
            *broken, call = parse_calls(whole)[1]  # a call that begins within another, which has no end
            self.errors += (f"{each.error}: {each.raw.strip()[:_TOLD_CHARS]}" for each in (*broken, call) if each.error)
            if broken or call.error:
                said.append(self._held + whole)
            else:
                calls.append(call)
            self._after_call = not (broken or call.error)
            self._held = after
        said.append(self._speak(self._held))
        return "".join(said), calls

    def close(self) -> str:
        """Return the held-back text at the end of the stream."""
        held, self._held = self._held, ""
        if TOOL_CALL in held:
            written = held.partition(TOOL_CALL)[2].strip()
            self.errors.append(f"it is not closed by {END_TOOL_CALL}: {written[:_TOLD_CHARS]}")
        return "" if self._after_call and not held.strip() else held

    def _speak(self, text: str, *, then_a_mark: bool = False) -> str:
        """Return the final part of text without a mark. Hold the rest: white space before a possible call, half a
        mark."""
        if self._after_call and not (text := text.lstrip()):
            self._held = ""
            return ""
        sure = len(text) if then_a_mark else len(text) - _overlap(text)
        sure = len(text[:sure].rstrip())
        self._held = text[sure:]
        self._after_call = self._after_call and not sure
        return text[:sure]


def _overlap(text: str) -> int:
    """Return the length of the longest end of `text` that the mark begins with."""
    return next((size for size in range(len(TOOL_CALL) - 1, 0, -1) if text.endswith(TOOL_CALL[:size])), 0)
