"""The keys of an online server: one may ask for answers, one may also train, and the token may do everything.

A route that is in no list needs the token.
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
"""Methods and paths. A path allows itself and all paths under it; one that ends in a slash, only those under it."""


@dataclass(frozen=True)
class Keys:
    """The keys of one data directory, each in its own file beside the token."""

    token: str
    by_scope: Mapping[str, str]

    @classmethod
    def of(cls, directory: Path, token: str) -> Keys:
        return cls(token, {scope: _key(directory / f"token-{scope}") for scope in SCOPES})

    def scope_of(self, credential: str) -> str:
        """Return the scope of a credential; empty if it is no key. The access gate checks the token."""
        found = ""
        for scope, key in self.by_scope.items():
            if hmac.compare_digest(credential.encode(), f"Bearer {key}".encode()):
                found = scope
        return found


class KeyRing:
    """Checks keys before the access gate. A request with a key that may do it continues with the token; the key's name
    is kept in the scope."""

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
    key = secrets.token_hex(32)
    atomic_write.write_bytes(file, key.encode(), mode=0o600)
    return key
