"""What the assistant asks of tools, told apart from what it says, while the text is still coming."""

from __future__ import annotations

from tandem.io.tool_calls import END_TOOL_CALL, TOOL_CALL, parse_calls
from tandem.types import ToolCall

_TOLD_CHARS = 200


class CallStream:
    """Nothing that was given out has to be taken back: a call comes when it is whole. White space around calls is
    dropped; a call that cannot be read stays in the text, and in `errors`."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._held = ""
        self._after_call = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The new text, and the calls that are whole now."""
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
            *broken, call = parse_calls(whole)[1]  # one that begins within another: the first did not end
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
        """What was held back: nothing follows that could change it."""
        held, self._held = self._held, ""
        if TOOL_CALL in held:
            written = held.partition(TOOL_CALL)[2].strip()
            self.errors.append(f"it is not closed by {END_TOOL_CALL}: {written[:_TOLD_CHARS]}")
        return "" if self._after_call and not held.strip() else held

    def _speak(self, text: str, *, then_a_mark: bool = False) -> str:
        """Of text without a mark: what is sure. The rest is held: white space that a call may follow, half a mark."""
        if self._after_call and not (text := text.lstrip()):
            self._held = ""
            return ""
        sure = len(text) if then_a_mark else len(text) - _overlap(text)
        sure = len(text[:sure].rstrip())
        self._held = text[sure:]
        self._after_call = self._after_call and not sure
        return text[:sure]


def _overlap(text: str) -> int:
    """How much of the text's end is a beginning of the mark."""
    return next((size for size in range(len(TOOL_CALL) - 1, 0, -1) if text.endswith(TOOL_CALL[:size])), 0)
