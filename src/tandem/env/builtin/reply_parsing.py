"""Find the answer in a reply: its last number or word, since chat models answer in sentences."""

from __future__ import annotations

import re
from decimal import Decimal

# A minus after a digit or letter is not a sign: `12-34` ends with 34.
_NUMBER = re.compile(r"(?:(?<!\w)[-\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_WORD = re.compile(r"[^\W\d_]+")


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None if there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def last_word(text: str, letters: int) -> str:
    """Return the last word of a text in lower case; `letters` single letters in a row count as one word: `a, b, c`."""
    words = _WORD.findall(text.lower())
    apart = words[-letters:]
    return "".join(apart) if all(len(word) == 1 for word in apart) else words[-1]
