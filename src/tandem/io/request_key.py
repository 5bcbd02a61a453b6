"""The idempotency key of a write request, for every service that stores such keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestKey:
    """The key and the digest of a request: the same key with the same digest gets the first reply again."""

    key: str
    digest: bytes
    keep_s: float = 0.0
    """Seconds to keep the reply; 0 uses the store's own limit."""
