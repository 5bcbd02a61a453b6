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


def text(request: Request, name: str) -> str:
    """Return a text of the query; empty if there is none."""
    found = request.query_params.get(name, "")
    if not found.isprintable() or len(found) > 120:
        raise RequestRefused(422, f"{name}: must have at most 120 printable characters", field=name)
    return found


def whole(request: Request, name: str, default: int, most: int) -> int:
    """Return a number of the query, at most `most`."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestRefused(422, f"{name} = '{text[:40]}': must be a whole number", field=name)
    return min(int(text), most)
