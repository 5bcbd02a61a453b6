"""People sign in with an OpenID provider: which ID tokens count, and what each person may do."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from plane import Served, served

from tandem.client.openid import SignedIn, renew
from tandem.control.openid import OpenIdProvider, OpenIdSettings, read_settings
from tandem.errors import ControlNotAllowed, SpecError

jwt = pytest.importorskip("joserfc.jwt")
jwk = pytest.importorskip("joserfc.jwk")

ISSUER = "https://sso.example.org"
GRANTS = (
    {"value": "leads", "scopes": ("runs:read", "keys")},
    {"value": "ml", "project": "default"},
)
"""What the tests' provider allows: the first that holds counts."""


class Signing:
    """A provider's key, and its documents; counts how often they are fetched."""

    def __init__(self) -> None:
        self.key = jwk.RSAKey.generate_key(2048, {"kid": "one"})
        self.fetched = 0

    async def fetch(self, url: str, form: Any) -> Any:
        self.fetched += 1
        if url.endswith("/.well-known/openid-configuration"):
            return {"issuer": ISSUER, "jwks_uri": f"{ISSUER}/jwks"}
        return {"keys": [self.key.as_dict(private=False)]}

    def token(self, nonce: str | None, now: int, *, alg: str = "RS256", key: Any = None, **changed: Any) -> str:
        claims = {
            "iss": ISSUER, "aud": "tandem", "sub": "p1", "email": "p1@example.org", "groups": ["ml"], "nonce": nonce,
            "iat": now // 1000, "exp": now // 1000 + 300, "jti": os.urandom(4).hex(), **changed,
        }  # fmt: skip
        told = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode({"alg": alg, "kid": "one"}, told, key or self.key, algorithms=[alg])


SIGNING = Signing()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = served(tmp_path_factory.mktemp("openid"), openid=_provider)
    yield made
    made.plane.store.close()


def _provider(digest: Callable[[bytes], bytes]) -> OpenIdProvider:
    settings = OpenIdSettings.model_validate({"issuer": ISSUER, "client_id": "tandem", "grants": GRANTS})
    return OpenIdProvider(settings, digest, lambda: "http://127.0.0.1", SIGNING.fetch)


def _nonce(plane: Served) -> str:
    return plane.ask("GET", "/api/login", "").json()["nonce"]


def _login(plane: Served, token: str, before: str = "") -> httpx.Response:
    return plane.ask("POST", "/api/login", "", {"id_token": token, "before": before})


def test_a_sign_in_gives_a_key_for_a_while_with_what_the_first_grant_allows(plane: Served):
    answer = _login(plane, SIGNING.token(_nonce(plane), plane.now[0]))
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    made = answer.json()
    assert (made["scopes"], made["project"]) == (["runs:read", "runs:write"], "default")
    assert made["expires_at"] == plane.now[0] + 3_600_000
    assert plane.ask("GET", "/api/me", made["key"]).json()["key"] == made["id"]
    leads = _login(plane, SIGNING.token(_nonce(plane), plane.now[0], sub="p2", groups=["ml", "leads"])).json()
    assert (leads["scopes"], leads["project"]) == (["keys", "runs:read"], "")
    rows = plane.ask("GET", "/api/audit", plane.key("admin")).json()["items"]
    noted = [each for each in rows if each["action"] == "POST /api/login"]
    assert [each["item"] for each in noted] == [made["id"], leads["id"]]
    assert made["key"] not in json.dumps(rows)
    plane.now[0] += 3_600_000
    assert plane.ask("GET", "/api/me", made["key"]).status_code == 401


def test_tokens_that_do_not_count_are_refused_each_for_its_reason(plane: Served):
    now, nonce = plane.now[0], _nonce(plane)
    public = SIGNING.key.as_pem(private=False)
    another = jwk.RSAKey.generate_key(2048, {"kid": "one"})
    begin, _, signature = SIGNING.token(nonce, now).rpartition(".")
    unsigned = base64.urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode()
    hs256 = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"one"}').rstrip(b"=").decode()
    confused = f"{hs256}.{begin.partition('.')[2]}"  # signed with the public key, which everyone has
    mac = base64.urlsafe_b64encode(hmac.digest(public, confused.encode(), "sha256")).rstrip(b"=").decode()
    refused = {
        "of another issuer": SIGNING.token(nonce, now, iss="https://other.example.org"),
        "for another client": SIGNING.token(nonce, now, aud="another"),
        "for another  client": SIGNING.token(nonce, now, aud=["tandem", "another"]),
        "for another   client": SIGNING.token(nonce, now, aud=["tandem", "another"], azp="another"),
        "it has expired": SIGNING.token(nonce, now, exp=now // 1000 - 60),
        "it has  expired": SIGNING.token(nonce, now, exp=None),
        "within the last ten minutes": SIGNING.token(nonce, now, iat=now // 1000 - 700),
        "within the  last ten minutes": SIGNING.token(nonce, now, iat=now // 1000 + 700),
        "no subject": SIGNING.token(nonce, now, sub=None),
        "its nonce": SIGNING.token("1.guessed.mac", now),
        "its  nonce": SIGNING.token(None, now),
        "its   nonce": SIGNING.token(plane.plane.openid.new_nonce(now - 700_000), now),
        "not signed": SIGNING.token(nonce, now, key=another),
        "not  signed": f"{confused}.{mac}",
        "not   signed": f"{unsigned}.{begin.partition('.')[2]}.",
        "not    signed": f"{begin}.{'A' * len(signature)}",
        "not     signed": "no.token.atall",
    }
    for why, token in refused.items():
        answer = _login(plane, token)
        assert answer.status_code == 401, why
        assert re.sub(" +", " ", why) in answer.json()["error"]["message"], why
    good = SIGNING.token(nonce, now)
    assert _login(plane, good).status_code == 201
    again = _login(plane, good)
    assert (again.status_code, "has been used" in again.text) == (401, True)
    stranger = _login(plane, SIGNING.token(nonce, now, sub="p9", groups=["other"]))
    assert (stranger.status_code, "no grant" in stranger.text) == (403, True)


def test_a_key_is_renewed_for_the_same_person_only_and_not_once_it_was_revoked(plane: Served):
    now = plane.now[0]
    first = _login(plane, SIGNING.token(_nonce(plane), now, sub="r1")).json()
    second = _login(plane, SIGNING.token(None, now, sub="r1", groups=["leads"]), first["key"])
    assert (second.status_code, second.json()["scopes"]) == (201, ["keys", "runs:read"])  # the claims of now
    other = _login(plane, SIGNING.token(None, now, sub="r2"), first["key"])
    assert (other.status_code, "is another person" in other.text) == (401, True)
    assert _login(plane, SIGNING.token(None, now, sub="r1"), first["key"][:-1] + "x").status_code == 401
    plane.made(f"/api/keys/{first['id']}/revoke", {}, plane.key("keys"))
    assert _login(plane, SIGNING.token(None, now, sub="r1"), first["key"]).status_code == 401
    stranger = _login(plane, SIGNING.token(_nonce(plane), now, sub="r3")).json()
    plane.now[0] = now = now + 31 * 86_400_000
    third = _login(plane, SIGNING.token(_nonce(plane), now, sub="r1")).json()
    known = {each["id"] for each in plane.ask("GET", "/api/keys", plane.key("keys")).json()["items"]}
    assert known >= {third["id"], stranger["id"]}
    assert not known & {first["id"], second.json()["id"]}  # they were forgotten


def test_a_new_key_of_the_provider_is_fetched_and_forged_ones_do_not_fetch_again_and_again(plane: Served):
    old, SIGNING.key = SIGNING.key, jwk.RSAKey.generate_key(2048, {"kid": "two"})
    plane.now[0] += 31_000
    assert _login(plane, SIGNING.token(_nonce(plane), plane.now[0])).status_code == 201
    fetched = SIGNING.fetched
    assert _login(plane, SIGNING.token(_nonce(plane), plane.now[0], key=old)).status_code == 401
    assert SIGNING.fetched == fetched


def test_a_server_without_a_provider_says_so(tmp_path: Path):
    without = served(tmp_path)
    assert without.ask("GET", "/api/login", "").status_code == 404
    assert _login(without, "a.b.c").status_code == 404
    without.plane.store.close()


def test_the_file_of_the_provider_is_checked(tmp_path: Path):
    file = tmp_path / "oidc.toml"
    file.write_text('issuer = "http://sso.example.org"\nclient_id = "t"\n[[grants]]\nvalue = "ml"\n')
    with pytest.raises(SpecError, match="must begin with https"):
        read_settings(file)
    file.write_text('issuer = "https://sso.example.org"\nclient_id = "t"\n[[grants]]\nvalue = "ml"\nscopes = ["all"]\n')
    with pytest.raises(SpecError, match=r"grants.0.scopes.0"):
        read_settings(file)
    file.write_text('issuer = "https://sso.example.org"\nclient_id = "t"\n[[grants]]\nvalue = "ml"\norg = "none"\n')
    without = served(tmp_path / "home")
    provider = OpenIdProvider(read_settings(file), lambda content: content, lambda: ISSUER)
    with pytest.raises(SpecError, match="org = 'none'"):
        asyncio.run(without.plane.store.read(provider.check_grants))
    without.plane.store.close()


def test_without_a_refresh_token_one_signs_in_again():
    with pytest.raises(ControlNotAllowed, match="tandem login http://x --oidc"):
        renew("http://x", "k", SignedIn(ISSUER, "tandem", "", 0), print)
