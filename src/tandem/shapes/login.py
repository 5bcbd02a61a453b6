"""Sign in with an OpenID provider.

1. GET /api/login -> LoginInfo: where the provider is, and a nonce for one sign-in.
2. The client lets a person sign in there (code flow with PKCE), and gets an ID token with that nonce.
3. POST /api/login LoginBody -> KeyInfo: a key that expires soon.

A client that has the provider's refresh token gets a further ID token with it, and sends that with the key that it has:
the claims are looked at again for each key.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from tandem.shapes.base import Answer, Asked


class LoginInfo(Answer):
    """How to sign in."""

    issuer: str
    client_id: str
    scopes: list[str]
    """To ask the provider for."""
    nonce: str
    """For one sign-in, within ten minutes."""
    prompt: str = ""
    """OpenID's parameter of this name, to send to the provider; empty: none."""


class LoginBody(Asked):
    """What the provider says of a person."""

    id_token: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")] = Field(max_length=16_000)
    before: str = Field(default="", max_length=200)
    """The key that the last sign-in of this person gave; then the ID token needs no nonce."""
