"""Make ids: `<kind>_<26 characters of base 32>`, 130 random bits."""

from __future__ import annotations

import secrets

_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


def new_id(kind: str) -> str:
    return f"{kind}_" + "".join(secrets.choice(_LETTERS) for _ in range(26))
