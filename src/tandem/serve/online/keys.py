"""Who may do what with an online server: a key that answers, one that teaches, and the token, which may do all.

A route that is in no list is the token's alone.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.io import atomic_write
from tandem.serve.http.refusals import RequestRefused
from tandem.serve.http.service import turn_away

SCOPES = ("infer", "train")
WHO = "tandem.who"

_MAY: Mapping[str, tuple[tuple[str, str], ...]] = {
    "infer": (
        ("GET", "/v1/"), ("POST", "/v1/"), ("GET", "/limits"), ("GET", "/train/status"), ("POST", "/feedback"),
        ("GET", "/openapi.json"),
    ),
    "train": (
        ("GET", "/v1/"), ("POST", "/v1/"), ("GET", "/limits"), ("GET", "/metrics"), ("GET", "/train"),
        ("POST", "/train"), ("GET", "/versions"), ("GET", "/sessions"), ("POST", "/sessions"), ("POST", "/feedback"),
        ("GET", "/openapi.json"),
    ),
}  # fmt: skip
"""Method, and what the path begins with; a path that ends in a slash or is followed by one, or whole."""


@dataclass(frozen=True)
class Keys:
    """Of one data directory, each in a file of its own beside the token."""

    token: str
    by_scope: Mapping[str, str]

    @classmethod
    def of(cls, directory: Path, token: str) -> Keys:
        return cls(token, {scope: _key(directory / f"token-{scope}") for scope in SCOPES})

    def scope_of(self, credential: str) -> str:
        """Empty: none of these; the door knows what to say."""
        found = ""
        for scope, key in self.by_scope.items():
            if hmac.compare_digest(credential.encode(), f"Bearer {key}".encode()):
                found = scope
        return found


class KeyRing:
    """Before the door: a key that may do what it asks for is let in as the token is, and its name stays with the
    request."""

    def __init__(self, app: ASGIApp, *, keys: Keys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        name = self.keys.scope_of(Headers(scope=scope).get("authorization", ""))
        scope[WHO] = name or "admin"
        if not name:
            return await self.app(scope, receive, send)
        if not allowed(name, scope["method"], scope["path"]):
            text = f"the key '{name}' may not do this; use the service's token"
            return await turn_away(RequestRefused(403, text), scope, receive, send)
        MutableHeaders(scope=scope)["authorization"] = f"Bearer {self.keys.token}"
        await self.app(scope, receive, send)


def allowed(name: str, method: str, path: str) -> bool:
    return any(
        method == known and (path == start or path.startswith(start if start.endswith("/") else f"{start}/"))
        for known, start in _MAY[name]
    )


def _key(file: Path) -> str:
    private = file.is_file() and not file.stat().st_mode & 0o077
    if private and (key := file.read_text().strip()):
        return key
    key = secrets.token_urlsafe(32)
    atomic_write.write_bytes(file, key.encode(), mode=0o600)
    return key
