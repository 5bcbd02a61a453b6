"""People who sign in with an OpenID provider: what its ID tokens must say, and what each person may do then.

An ID token counts once, if the provider signed it within the last minutes for this server, and if it has a nonce that
this server gave out. A key of the same person stands for the nonce: it shows that the person has signed in before.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.parse import urlencode, urlsplit

import sqlalchemy as sa
from pydantic import Field, TypeAdapter, ValidationError
from sqlalchemy.orm import Session

from tandem.control import queries
from tandem.control.callers import Caller
from tandem.control.ids import new_id
from tandem.control.tables import Answered, Key, Org
from tandem.control.tokens import hash_of, id_in, new_key_token
from tandem.errors import NotKnown, SpecError
from tandem.serve.http.refusals import RequestRefused
from tandem.shapes.runs import Scope
from tandem.spec.base import Spec
from tandem.spec.load import plain_message
from tandem.spec.toml import read_toml

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA")
"""With a public key only: with HS256, which anyone can compute of the public key, and without one no token counts."""
FRESH_MS = 600_000
"""How old a nonce may be, and how long ago the provider may have signed an ID token."""
_SKEW_S = 30
_KEYS_MS, _KEYS_AGAIN_MS = 3_600_000, 30_000
_KEPT_MS = 30 * 86_400_000  # an expired key of a person, which can still be renewed
ANYONE = "*"

Fetch = Callable[[str, Mapping[str, str]], Awaitable[Any]]
"""Returns the JSON at a URL, posted a form if it is not empty; OSError or ValueError if it has none."""


class Grant(Spec):
    """What the people may do whose claim has a value."""

    value: str = Field(min_length=1)
    """A value of the claim; "*": everyone who can sign in."""
    org: str = "default"
    project: str = ""
    """The only project that they may see; empty: all of the org."""
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, strict=False)] = ("runs:read", "runs:write")


class OpenIdSettings(Spec):
    """The file of `tandem control serve --oidc`."""

    issuer: str
    client_id: str = Field(min_length=1)
    scopes: Annotated[tuple[str, ...], Field(strict=False)] = ("openid", "email", "offline_access")
    prompt: str = ""
    """What `tandem login` sends as OpenID's `prompt`. "consent": some providers give a refresh token with it alone."""
    claim: str = "groups"
    """Whose values the grants name: a text or a list of texts of the ID token."""
    key_minutes: Annotated[int, Field(ge=5, le=1440)] = 60
    """How long a key is valid. Then the client gets another one, as long as the provider says so."""
    grants: Annotated[tuple[Grant, ...], Field(min_length=1, strict=False)]
    """The first one that holds counts."""


def read_settings(path: Path) -> OpenIdSettings:
    """Read the file of an OpenID provider."""
    try:
        settings = TypeAdapter(OpenIdSettings).validate_python(read_toml(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SpecError(f"{path}: {'.'.join(map(str, first['loc']))}: {plain_message(first)}") from error
    where = urlsplit(settings.issuer)
    if where.scheme != "https" and where.hostname not in ("127.0.0.1", "localhost"):
        raise SpecError(f"{path}: issuer = '{settings.issuer}': must begin with https://")
    return settings


@dataclass(frozen=True, slots=True)
class Person:
    """Whom an ID token is about."""

    name: str
    """Of the keys that it gets: it is the same for the same person only."""
    values: frozenset[str]
    token: str
    """The digest of the ID token."""


class OpenIdProvider:
    """`digest`: keyed, with a secret of the server; `url`: where browsers reach this server; `fetch`: asks the
    provider."""

    def __init__(
        self,
        settings: OpenIdSettings,
        digest: Callable[[bytes], bytes],
        url: Callable[[], str],
        fetch: Fetch | None = None,
    ) -> None:
        self.settings, self.url, self._digest, self._fetch = settings, url, digest, fetch or _fetched
        self._keys: list[Any] = []
        self._keys_at = 0

    def new_nonce(self, now: int) -> str:
        begin = f"{now}.{secrets.token_hex(16)}"
        return f"{begin}.{self._mac(begin)}"

    def _mac(self, begin: str) -> str:
        return self._digest(b"openid nonce\n" + begin.encode()).hex()

    def _is_own(self, nonce: object, now: int) -> bool:
        begin, _, mac = str(nonce).rpartition(".")
        at = begin.partition(".")[0]
        if not (str(nonce).isascii() and hmac.compare_digest(mac, self._mac(begin))):
            return False
        return at.isdigit() and 0 <= now - int(at) <= FRESH_MS

    async def address(self, state: str, nonce: str, challenge: str) -> str:
        """Return where a browser signs in; the provider sends it back to `back`."""
        asked = {
            "response_type": "code", "client_id": self.settings.client_id, "redirect_uri": self.back, "state": state,
            "scope": " ".join(each for each in self.settings.scopes if each != "offline_access"), "nonce": nonce,
            "code_challenge": challenge, "code_challenge_method": "S256",
        }  # fmt: skip
        end = str((await self._configuration())["authorization_endpoint"])
        return f"{end}{'&' if '?' in end else '?'}{urlencode(asked)}"

    @property
    def back(self) -> str:
        return f"{self.url()}/login/done"

    async def bought(self, code: str, verifier: str) -> str:
        """Return the ID token for a code. RequestRefused if the provider does not take the code."""
        asked = {
            "grant_type": "authorization_code", "code": code, "redirect_uri": self.back,
            "client_id": self.settings.client_id, "code_verifier": verifier,
        }  # fmt: skip
        configuration = await self._configuration()
        try:
            return str((await self._fetch(configuration["token_endpoint"], asked))["id_token"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestRefused(401, f"the OpenID provider does not take the code: {error}; sign in again") from None

    async def _configuration(self) -> Mapping[str, Any]:
        try:
            found = await self._fetch(f"{self.settings.issuer.rstrip('/')}/.well-known/openid-configuration", {})
            if found["issuer"] != self.settings.issuer:
                raise ValueError(f"it says that it is '{found['issuer']}'")
            return found
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestRefused(503, f"the OpenID provider {self.settings.issuer} does not answer: {error}") from None

    async def person(self, id_token: str, now: int, *, known: bool = False, nonce: str = "") -> Person:
        """Return whom an ID token is about. RequestRefused if it does not count. `known`: it needs no nonce; `nonce`:
        it must be this one."""
        claims = await self._claims(id_token, now)
        given, now_s = self.settings, now / 1000
        audience = _listed(claims.get("aud"))
        signed, until, subject = claims.get("iat"), claims.get("exp"), claims.get("sub")
        if claims.get("iss") != given.issuer:
            raise _refused(f"it is of another issuer than {given.issuer}")
        if given.client_id not in audience or (len(audience) > 1 and claims.get("azp") != given.client_id):
            raise _refused("it is for another client than this server's")
        if not isinstance(until, int | float) or until <= now_s - _SKEW_S:
            raise _refused("it has expired")
        if not isinstance(signed, int | float) or not -FRESH_MS / 1000 <= signed - now_s <= _SKEW_S:
            raise _refused("it was not signed within the last ten minutes")
        if not isinstance(subject, str) or not subject:
            raise _refused("it names no subject")
        if not known and (not self._is_own(claims.get("nonce"), now) or nonce not in ("", claims.get("nonce"))):
            raise _refused("its nonce is none that this server gave out within the last ten minutes")
        who = hashlib.sha256(f"{given.issuer}\n{subject}".encode()).hexdigest()[:24]
        told = str(claims.get("email") or claims.get("preferred_username") or "")
        shown = "".join(each for each in told if each.isprintable())[:60]
        found = frozenset(each for each in _listed(claims.get(given.claim)) if isinstance(each, str))
        return Person(f"openid {who} {shown}".strip(), found, hashlib.sha256(id_token.encode()).hexdigest())

    async def _claims(self, id_token: str, now: int) -> Mapping[str, Any]:
        """Return what a token says that the provider signed. A key that is not known yet may be a new one."""
        for again in (False, True):
            for key in await self._signing_keys(now, again=again):
                if (claims := _verified(id_token, key)) is not None:
                    return claims
        raise _refused("it is not signed by the provider")

    async def _signing_keys(self, now: int, *, again: bool) -> Sequence[Any]:
        jwk: Any = import_module("joserfc.jwk")
        if now - self._keys_at <= (_KEYS_AGAIN_MS if again else _KEYS_MS) and self._keys:
            return () if again else self._keys
        configuration = await self._configuration()
        try:
            keys = jwk.KeySet.import_key_set(await self._fetch(configuration["jwks_uri"], {})).keys
            self._keys = [key for key in keys if key.key_type != "oct"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestRefused(503, f"the OpenID provider's keys cannot be had: {error}") from None
        self._keys_at = now
        return self._keys

    def grant(self, person: Person) -> Grant:
        """Return what a person may do; 403 if nothing."""
        for each in self.settings.grants:
            if each.value == ANYONE or each.value in person.values:
                return each
        claim = self.settings.claim
        why = f"no grant of this server names a value of your claim '{claim}'"
        if not person.values:
            why = f"your ID token has no claim '{claim}'; tell the operator of this server"
        raise RequestRefused(403, f"you have signed in, but {why}")

    def check_grants(self, session: Session) -> None:
        """SpecError if a grant names an org or a project that is not there."""
        for each in self.settings.grants:
            try:
                _place_of(session, each)
            except NotKnown as error:
                raise SpecError(f"--oidc: the grant of '{each.value}': {error}") from error

    def new_key(self, session: Session, person: Person, now: int) -> tuple[Key, str]:
        """Make the key of a person; return its row and the key. 401 if the ID token has been used."""
        used = f"openid:{person.token}"
        if session.get(Answered, used) is not None:
            raise _refused("it has been used")
        session.add(Answered(id=used, at=now, digest=person.token, answer={}))
        who = " ".join(person.name.split(" ")[:2])
        session.execute(sa.delete(Key).where(Key.name.startswith(who), Key.expires_at < now - _KEPT_MS))
        grant = self.grant(person)
        org, project = _place_of(session, grant)
        token = new_key_token(key_id := new_id("key"))
        row = Key(
            id=key_id, org=org, at=now, name=person.name, sha256=hash_of(token), scopes=sorted(set(grant.scopes)),
            project=project, expires_at=now + self.settings.key_minutes * 60_000, revoked_at=0,
        )  # fmt: skip
        session.add(row)
        session.flush()
        return row, token


def is_key_of(session: Session, token: str, person: Person) -> bool:
    """Return whether a sign-in gave this key to this person. It may have expired, but not been revoked."""
    row = session.get(Key, id_in(token)[1]) if token.isascii() and token.isprintable() else None
    if row is None or row.revoked_at or not hmac.compare_digest(hash_of(token), row.sha256):
        return False
    return row.name.split(" ")[:2] == person.name.split(" ")[:2]


def _place_of(session: Session, grant: Grant) -> tuple[str, str]:
    org = session.scalar(sa.select(Org.id).where(Org.name == grant.org))
    if org is None:
        raise NotKnown(f"org = '{grant.org}': there is none of this name", field="org")
    caller = Caller("", org, frozenset())
    return org, queries.project_of(session, caller, grant.project) if grant.project else ""


def _listed(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _verified(id_token: str, key: Any) -> Mapping[str, Any] | None:
    """Return what a token says; None if this key did not sign it."""
    jwt: Any = import_module("joserfc.jwt")
    errors: Any = import_module("joserfc.errors")
    try:
        return jwt.decode(id_token, key, algorithms=list(ALGORITHMS)).claims
    except (errors.JoseError, ValueError, TypeError):
        return None


async def _fetched(url: str, form: Mapping[str, str]) -> Any:
    import httpx

    try:
        async with httpx.AsyncClient(timeout=10.0) as client:
            answer = await (client.post(url, data=dict(form)) if form else client.get(url))
            answer.raise_for_status()
            return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OSError(f"{url}: {error}") from error


def _refused(why: str) -> RequestRefused:
    return RequestRefused(401, f"this ID token does not count: {why}; sign in again", field="id_token")
