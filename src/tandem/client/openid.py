"""Sign in with the OpenID provider of a control server: the code flow with PKCE, over a port of this machine.

1. The server says where its provider is, and gives a nonce.
2. The person signs in with a browser; the provider sends it back to a port of 127.0.0.1 with a code.
3. The code buys an ID token, once, with the secret that only this process has.
4. The server takes the ID token, and gives a key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import ValidationError

from tandem.errors import ControlNotAllowed, ControlSilent
from tandem.shapes.login import LoginBody, LoginInfo
from tandem.shapes.runs import KeyInfo

if TYPE_CHECKING:
    import httpx

SIGN_IN_S = 300.0
RENEW_S = 120.0
"""Before a key expires, another is asked for."""
_DONE = (
    b"<!doctype html><meta charset=utf-8><title>Tandem</title><p>You can close this page and go back to the terminal."
)


@dataclass(frozen=True, slots=True)
class SignedIn:
    """How to get a further key without a browser."""

    issuer: str
    client_id: str
    refresh_token: str = field(repr=False)
    """Of the provider; empty: it gave none, so the person must sign in again."""
    expires_at: int
    """When the key expires, in milliseconds since 1970."""

    @property
    def is_due(self) -> bool:
        return time.time() > self.expires_at / 1000 - RENEW_S


def sign_in(url: str, show: Callable[[str], None]) -> tuple[str, SignedIn]:
    """Let a person sign in; return the key and how to get the next. `show` gets the address for a browser."""
    import httpx

    with httpx.Client(timeout=30.0) as http:
        info = LoginInfo.model_validate(_ask(http, url, "GET", f"{url}/api/login"))
        provider = _configuration(http, info.issuer)
        verifier, state = secrets.token_urlsafe(48), secrets.token_urlsafe(24)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        with _Loopback(state) as back:
            asked = {
                "response_type": "code", "client_id": info.client_id, "redirect_uri": back.url,
                "scope": " ".join(info.scopes), "state": state, "nonce": info.nonce,
                "code_challenge": challenge, "code_challenge_method": "S256",
                **({"prompt": info.prompt} if info.prompt else {}),
            }  # fmt: skip
            address = str(provider["authorization_endpoint"])
            show(f"{address}{'&' if '?' in address else '?'}{urlencode(asked)}")
            code = back.wait()
        bought = {
            "grant_type": "authorization_code", "code": code, "redirect_uri": back.url,
            "client_id": info.client_id, "code_verifier": verifier,
        }  # fmt: skip
        tokens = _ask(http, info.issuer, "POST", str(provider["token_endpoint"]), data=bought)
        return _key(http, url, info.issuer, info.client_id, tokens, "")


def renew(url: str, key: str, known: SignedIn, keep: Callable[[SignedIn], object]) -> tuple[str, SignedIn]:
    """Return a further key, as long as the provider says that the person is who it was. `keep` gets the provider's new
    refresh token before the server is asked: the one before may be worth nothing by then."""
    import httpx

    if not known.refresh_token:
        raise _again(url, f"your key expires, and {known.issuer} gave no refresh token")
    with httpx.Client(timeout=10.0) as http:
        provider = _configuration(http, known.issuer)
        asked = {"grant_type": "refresh_token", "refresh_token": known.refresh_token, "client_id": known.client_id}
        try:
            tokens = _ask(http, known.issuer, "POST", str(provider["token_endpoint"]), data=asked)
            tokens = {"refresh_token": known.refresh_token, **tokens}
            keep(replace(known, refresh_token=str(tokens["refresh_token"])))
            return _key(http, url, known.issuer, known.client_id, tokens, key)
        except ControlNotAllowed as error:
            if error.status == 403:  # no grant names the person any more
                raise
            raise _again(url, str(error).removesuffix("; sign in again")) from error


def _key(
    http: httpx.Client, url: str, issuer: str, client_id: str, tokens: dict[str, Any], before: str
) -> tuple[str, SignedIn]:
    try:
        body = LoginBody(id_token=str(tokens.get("id_token", "")), before=before)
    except ValidationError:
        raise _again(url, f"{issuer} gave no ID token") from None
    headers = {"Content-Type": "application/json"}
    told = _ask(http, url, "POST", f"{url}/api/login", content=body.model_dump_json(), headers=headers)
    made = KeyInfo.model_validate(told)
    return made.key, SignedIn(issuer, client_id, str(tokens.get("refresh_token", "")), made.expires_at)


def _again(url: str, why: str) -> ControlNotAllowed:
    return ControlNotAllowed(f"{why}; sign in again: tandem login {url} --oidc", status=401)


def _configuration(http: httpx.Client, issuer: str) -> dict[str, Any]:
    found = _ask(http, issuer, "GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration")
    if found.get("issuer") != issuer:
        raise ControlNotAllowed(f"{issuer}: says that it is '{found.get('issuer')}'; ask the operator", status=401)
    return found


def _ask(http: httpx.Client, who: str, method: str, address: str, **more: Any) -> dict[str, Any]:
    """Return what was answered. It may hold tokens, so no error shows more of it than why it was refused."""
    import httpx

    try:
        answer = http.request(method, address, **more)
        told: object = answer.json() if answer.content else None
    except httpx.HTTPError as error:
        raise ControlSilent(f"{who}: does not answer: {error}") from error
    except ValueError:
        raise ControlSilent(f"{who}: answers with what is no JSON; is the address right?") from None
    table = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
    if answer.is_success and table:
        return table
    error = table.get("error")
    why = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else error
    text = f"{who}: answers {answer.status_code}: {why or 'nothing'!s:.300}"
    raise ControlSilent(text) if answer.status_code >= 500 else ControlNotAllowed(text, status=answer.status_code)


class _Loopback:
    """A port of this machine to which the provider sends the browser back, once."""

    def __init__(self, state: str) -> None:
        self.found: dict[str, str] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                where = urlsplit(self.path)
                told = dict(parse_qsl(where.query))
                same = hmac.compare_digest(told.get("state", "").encode(), state.encode())
                known = where.path == "/done" and same
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Security-Policy", "default-src 'none'")
                self.end_headers()
                if known:
                    self.wfile.write(_DONE)
                    outer.found = told

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: the address has the code."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/done"

    def wait(self) -> str:
        """Return the code. Requests without this sign-in's state are refused, and waited on."""
        until = time.monotonic() + SIGN_IN_S
        while not self.found and (left := until - time.monotonic()) > 0:
            self._server.timeout = left
            self._server.handle_request()
        if "code" in self.found:
            return self.found["code"]
        why = self.found.get("error", "the sign-in took longer than five minutes")
        raise ControlNotAllowed(f"the OpenID provider gave no code: {why:.200}; sign in again", status=401)

    def __enter__(self) -> _Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()
