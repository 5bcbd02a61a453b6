"""What one request may ask this process to read, looked at before anything is made of it."""

from __future__ import annotations

from tandem.io.json_size import holds_more
from tandem.serve.http.refusals import RequestRefused

AT_ONCE_BYTES = 64 * 2**10
"""What is read on the event loop. More takes long enough to hold other requests up."""
MAX_N = 64
MAX_PROMPTS = 256
MAX_MESSAGES = 8192
MAX_TOOLS_BYTES = 2**18
"""Of all tools of one request, as JSON."""
MAX_VALUES = 2**20
"""Of one body: what stands in its lists and objects."""


def check_values(raw: bytes, field: str = "") -> None:
    """Raise Refused if parsing a JSON text would take far more memory than the text."""
    if len(raw) > AT_ONCE_BYTES and holds_more(raw, MAX_VALUES, b"[{,:"):
        raise RequestRefused(
            413, f"more than {MAX_VALUES} values (numbers, texts, lists, objects); send fewer", field=field
        )


def check_containers(raw: bytes) -> None:
    """The same where many numbers are expected, and lists of them are not."""
    if len(raw) > AT_ONCE_BYTES and holds_more(raw, MAX_VALUES, b"[{"):
        raise RequestRefused(413, f"more than {MAX_VALUES} lists and objects; send fewer")
