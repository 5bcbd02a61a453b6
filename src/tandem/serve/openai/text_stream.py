"""Turn a stream of token ids into text that never has to be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class TextStream:
    """Holds back text that a later token may change: an unfinished character, or the beginning of a stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self.num_chars = 0
        """Number of characters that are final, held-back text included."""
        self.stopped = False
        self._decode, self._stop = decode, stop
        # The last ids, with some earlier ids as context for the decoder (leading spaces).
        self._window: list[int] = []
        self._fresh = 0
        self._decoded = 0  # final characters of the window's text
        self._held = ""

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the new text, cut before a stop string."""
        self._window.extend(ids)
        self._fresh += len(ids)
        text = self._decode(self._window)
        sure = len(text) - _unfinished(text)
        new = text[self._decoded : sure]
        self.num_chars += len(new)
        if new and sure == len(text):
            self._window = self._window[-self._fresh :]
            self._decoded, self._fresh = len(self._decode(self._window)), 0
        else:
            self._decoded = max(self._decoded, sure)
        return self._cut(new)

    def close(self) -> str:
        """Return the held-back text at the end of the stream."""
        text = self._cut(self._decode(self._window)[self._decoded :])
        text, self._held = text + self._held, ""
        return text

    def _cut(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        if found := [at for word in self._stop if (at := text.find(word)) >= 0]:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = len(text) - max((_overlap(text, word) for word in self._stop), default=0)
        self._held = text[keep:]
        return text[:keep]


def _unfinished(text: str) -> int:
    """Return how many replacement characters at the end may be the first bytes of one character: at most three."""
    return min(3, len(text) - len(text.rstrip("\ufffd")))


def _overlap(text: str, word: str) -> int:
    """Return the length of the longest end of `text` that `word` begins with."""
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:size])), 0)


# --- single tokens


class TokenNames(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...
    def token_text(self, token_id: int) -> str: ...  # the vocabulary's text of it


def token_bytes(renderer: TokenNames, token_id: int) -> bytes | None:
    """Return the bytes of a token, even if they are only a part of a character."""
    symbol, text = renderer.token_text(token_id), renderer.decode([token_id], skip_special=False)
    if symbol.startswith("▁"):
        return symbol.replace("▁", " ").encode()  # SentencePiece: decoding it alone would drop the space
    if "\ufffd" not in text:
        return text.encode()
    if symbol.startswith("<0x") and len(symbol) == 6:
        return bytes([int(symbol[3:5], 16)])
    if all(character in _BYTE_OF for character in symbol):
        return bytes(_BYTE_OF[character] for character in symbol)
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE: printable bytes are themselves, others are 256 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
