"""Sign in with an OpenID provider. `tandem.shapes.login` says what travels between this server and a client.

In a browser the server is the client: /login sends it to the provider, which sends it back to /login/done. A cookie of
that browser alone has what both must know: so a code that another browser got is worth nothing. The key goes to the
dashboard in the fragment of its address, which no log and no other server sees. A page of this server leads there:
after a redirect the browser would say that the provider's page asks for the dashboard, which is refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import secrets
from collections.abc import Awaitable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy.orm import Session

from tandem.control import queries
from tandem.control.api.requests import Plane, answer, asked, note
from tandem.control.openid import FRESH_MS, OpenIdProvider, Person, is_key_of
from tandem.control.rates import RateLimit
from tandem.control.tables import Key
from tandem.serve.http.openapi_document import speaks
from tandem.serve.http.refusals import RequestRefused
from tandem.shapes.login import LoginBody, LoginInfo
from tandem.shapes.runs import KeyInfo

PATH, BEGIN, DONE = "/api/login", "/login", "/login/done"
"""Open: who signs in has no key yet."""
_COOKIE = "tandem-login"
_PER_S = 10.0
_FRESH = {"Cache-Control": "no-store"}


class LoginRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane, self._rate = plane, RateLimit(_PER_S)
        self.router = APIRouter()
        self.router.add_api_route(PATH, self.info, methods=["GET"])
        self.router.add_api_route(PATH, self.login, methods=["POST"], status_code=201)
        self.router.add_api_route(BEGIN, self.begin, methods=["GET"], include_in_schema=False)
        self.router.add_api_route(DONE, self.done, methods=["GET"], include_in_schema=False)

    @speaks(answer=LoginInfo, refuses=(404,))
    async def info(self) -> Response:
        """Say where to sign in. 404 if this server has no OpenID provider."""
        provider = self._provider()
        given = provider.settings
        nonce = provider.new_nonce(self.plane.clock())
        told = LoginInfo(
            issuer=given.issuer, client_id=given.client_id, scopes=list(given.scopes), nonce=nonce, prompt=given.prompt
        )  # fmt: skip
        return answer(told, headers=_FRESH)

    @speaks(LoginBody, status=201, answer=KeyInfo)
    async def login(self, request: Request) -> Response:
        """Make a key for the person that an ID token is about. This answer alone has the key itself."""
        provider, now = self._provider(), self.plane.clock()
        self._may()
        body = await asked(request, LoginBody)
        person = await provider.person(body.id_token, now, known=bool(body.before))
        told = await self._key_for(request, person, body.before)
        return answer(told, 201, _FRESH)

    async def begin(self) -> Response:
        """Send a browser to the provider."""
        return await _for_a_person(self._begin())

    async def _begin(self) -> Response:
        provider = self._provider()
        self._may()
        state, verifier = secrets.token_urlsafe(24), secrets.token_urlsafe(48)
        nonce = provider.new_nonce(self.plane.clock())
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        sent = RedirectResponse(await provider.address(state, nonce, challenge), 303, _FRESH)
        sent.set_cookie(_COOKIE, f"{state}~{verifier}~{nonce}", **self._kept(FRESH_MS // 1000))
        return sent

    async def done(self, request: Request) -> Response:
        """Take the browser back, with a key."""
        return await _for_a_person(self._done(request))

    async def _done(self, request: Request) -> Response:
        provider, query = self._provider(), request.query_params
        self._may()
        state, verifier, nonce = (*request.cookies.get(_COOKIE, "").split("~"), "", "")[:3]
        if not state or not hmac.compare_digest(query.get("state", "").encode(), state.encode()):
            raise RequestRefused(401, f"this browser did not begin to sign in here; open {provider.url()}{BEGIN}")
        if not (code := query.get("code", "")):
            raise RequestRefused(
                401, f"the OpenID provider gave no code: {query.get('error', '')!r:.200}; sign in again"
            )
        id_token = await provider.bought(code, verifier)
        told = await self._key_for(request, await provider.person(id_token, self.plane.clock(), nonce=nonce), "")
        to = f"{provider.url()}/#token={told.key}"
        sent = _page(f'<meta http-equiv=refresh content="0; url={html.escape(to)}"><p>You have signed in.')
        sent.set_cookie(_COOKIE, "", **self._kept(0))
        return sent

    def _kept(self, seconds: int) -> dict[str, Any]:
        """`lax`: a browser sends it when the provider sends the person back, and to no request of another page."""
        secure = self._provider().url().startswith("https://")
        return {"max_age": seconds, "path": BEGIN, "httponly": True, "samesite": "lax", "secure": secure}

    def _may(self) -> None:
        if wait_s := self._rate.take(PATH):
            raise RequestRefused(429, "too many people sign in at once; send it again", retry_after_s=wait_s)

    async def _key_for(self, request: Request, person: Person, before: str) -> KeyInfo:
        provider, now = self._provider(), self.plane.clock()

        def change(session: Session) -> tuple[Key, str, KeyInfo]:
            if before and not is_key_of(session, before, person):
                raise RequestRefused(401, "your key was revoked, or is another person's; sign in again", field="before")
            row, token = provider.new_key(session, person, now)
            told = queries.key_info(session, row)
            note(self.plane, session, request, row.org, row.name, told.model_dump(mode="json"), now)
            return row, token, told

        row, token, told = await self.plane.store.write(change)
        self.plane.callers.put(row)
        return told.model_copy(update={"key": token})

    def _provider(self) -> OpenIdProvider:
        if self.plane.openid is None:
            raise RequestRefused(404, "this server has no OpenID provider; log in with a key")
        return self.plane.openid


def _page(body: str, status: int = 200) -> Response:
    policy = {"Content-Security-Policy": "default-src 'none'", "Referrer-Policy": "no-referrer"}
    return HTMLResponse(f"<!doctype html><meta charset=utf-8><title>Tandem</title>{body}", status, _FRESH | policy)


async def _for_a_person(answering: Awaitable[Response]) -> Response:
    """Return the answer, or a page that says why there is none."""
    try:
        return await answering
    except RequestRefused as refused:
        return _page(f'<p>{html.escape(str(refused))}<p><a href="{BEGIN}">Sign in again</a>', refused.status)
