"""Limits on the content of one request, checked before it is parsed."""

from __future__ import annotations

import re

from fastapi import Request

from tandem.io.json_size import holds_more
from tandem.serve.http.refusals import RequestRefused

AT_ONCE_BYTES = 64 * 2**10
"""Larger bodies are parsed off the event loop, because parsing them would delay other requests."""
MAX_N = 64
MAX_PROMPTS = 256
MAX_MESSAGES = 8192
MAX_TOOLS_BYTES = 2**18
"""Most bytes of all tools of one request, as JSON."""
MAX_VALUES = 2**20
"""Most values in the lists and objects of one body."""
KEY_PATTERN = r"[A-Za-z0-9._:/-]{1,128}"
_KEY = re.compile(KEY_PATTERN)


def idempotency_key(request: Request, otherwise: str = "") -> str:
    """Return the Idempotency-Key of a write. `otherwise`: taken where it has none; empty: it must have one."""
    key = request.headers.get("idempotency-key", otherwise)
    if not _KEY.fullmatch(key):
        raise RequestRefused(
            422,
            "send a new Idempotency-Key with every write, and the same one to repeat it: 1 to 128 letters, digits "
            "and . _ : / -",
            field="idempotency-key",
        )
    return key


def check_values(raw: bytes, field: str = "") -> None:
    """Raise RequestRefused if parsing a JSON text would take far more memory than the text."""
    if len(raw) > AT_ONCE_BYTES and holds_more(raw, MAX_VALUES, b"[{,:"):
        raise RequestRefused(
            413, f"more than {MAX_VALUES} values (numbers, texts, lists, objects); send fewer", field=field
        )


def check_containers(raw: bytes) -> None:
    """Do as `check_values` does, but count only lists and objects: such bodies may have many numbers."""
    if len(raw) > AT_ONCE_BYTES and holds_more(raw, MAX_VALUES, b"[{"):
        raise RequestRefused(413, f"more than {MAX_VALUES} lists and objects; send fewer")
