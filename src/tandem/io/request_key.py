"""The key of a write request that a client may send again: one class for every service that stores such keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestKey:
    """One request, however often it is sent: the same key with the same digest gets the first answer again."""

    key: str
    digest: bytes
    keep_s: float = 0.0
    """Seconds that the answer is kept; 0 uses the store's own limit."""
