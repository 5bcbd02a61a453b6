"""What a reply answers. Chat models answer in sentences, small ones with the answer alone: what comes last counts."""

from __future__ import annotations

import re
from decimal import Decimal

# A minus right behind a digit or a letter is no sign: `12-34` ends with 34.
_NUMBER = re.compile(r"(?:(?<!\w)[-\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_WORD = re.compile(r"[^\W\d_]+")


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, and None where there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def last_word(text: str, letters: int) -> str:
    """Return the last word of a text in small letters; so many letters that stand alone are one word: `a, b, c`."""
    words = _WORD.findall(text.lower())
    apart = words[-letters:]
    return "".join(apart) if all(len(word) == 1 for word in apart) else words[-1]
