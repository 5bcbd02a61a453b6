"""People sign in with a real OpenID provider, a real server and their own client or browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tandem.client import place as places
from tandem.client.openid import renew, sign_in
from tandem.errors import ControlNotAllowed

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))

from browser import Page, browser_only, browsing

pytest.importorskip("authlib.oauth2")
pytest.importorskip("joserfc.jwt")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """A provider and a control server; yields the provider's directory and both URLs."""
    home = tmp_path_factory.mktemp("real")
    (home / "person.json").write_text(json.dumps({"sub": "p1", "groups": ["ml"], "email": "p1@example.org"}))
    with _process([str(Path(__file__).with_name("openid_provider.py")), str(home)], home / "url"):
        issuer = (home / "url").read_text()
        (home / "oidc.toml").write_text(
            f'issuer = "{issuer}"\nclient_id = "tandem-test"\nprompt = "consent"\n[[grants]]\nvalue = "ml"\n'
        )
        (home / "targets.toml").write_text('[targets.box]\nkind = "local"\n')
        ready = home / "data" / "ready.json"
        serve = ["-m", "tandem", "control", "serve", "--data-dir", str(home / "data"), "--port", "0"]
        serve += ["--targets", str(home / "targets.toml"), "--oidc", str(home / "oidc.toml")]
        with _process(serve, ready):
            yield home, issuer, json.loads(ready.read_text())["url"]


class _process:
    def __init__(self, argv: list[str], ready: Path) -> None:
        self.argv, self.ready = argv, ready

    def __enter__(self) -> None:
        self.child = subprocess.Popen([sys.executable, *self.argv])
        while not self.ready.exists():
            assert self.child.poll() is None
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.child.terminate()
        self.child.wait(20)


def _browser(address: str) -> None:
    """Sign in beside the client, which waits for the provider's answer."""
    threading.Thread(target=lambda: httpx.get(address, follow_redirects=True)).start()


def test_login_and_renewal_with_a_real_provider(real: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch):
    home, issuer, url = real
    (waits := home / "browser").write_text(  # as one in the terminal does, until its person leaves it
        f"#!{sys.executable}\nimport httpx, sys\nhttpx.get(sys.argv[1], follow_redirects=True)\n"
    )
    waits.chmod(0o755)
    command = [sys.executable, "-m", "tandem", "login", url, "--oidc"]
    env = {**os.environ, "HOME": str(home), "BROWSER": str(waits)}
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.endswith(": org default, runs:read, runs:write\n")
    key, signed_in = sign_in(url, _browser)
    monkeypatch.setattr(places, "PLACE_FILE", home / "control.toml")
    monkeypatch.delenv(places.URL_VARIABLE, raising=False)
    places.save_place(places.Place(url, key, "", replace(signed_in, expires_at=int(time.time() * 1000) + 60_000)))
    assert (home / "control.toml").stat().st_mode & 0o077 == 0
    found = places.find_place()
    assert found is not None
    assert found.signed_in is not None
    assert found.key != key
    assert found.signed_in.refresh_token != signed_in.refresh_token
    assert places.find_place() == found  # it is valid for an hour now
    assert httpx.get(f"{url}/api/me", headers={"Authorization": f"Bearer {found.key}"}).json()["scopes"] == [
        "runs:read", "runs:write",
    ]  # fmt: skip
    with pytest.raises(ControlNotAllowed, match="sign in again"):
        renew(url, key, signed_in, print)  # its refresh token was used
    (home / "person.json").write_text(json.dumps({"sub": "p1", "groups": ["gone"]}))
    kept = [found.signed_in]
    with pytest.raises(ControlNotAllowed, match="no grant"):
        renew(url, found.key, found.signed_in, kept.append)
    (home / "person.json").write_text(json.dumps({"sub": "p1"}))
    with pytest.raises(ControlNotAllowed, match="your ID token has no claim 'groups'"):
        renew(url, found.key, kept[-1], kept.append)
    (home / "person.json").write_text(json.dumps({"sub": "p1", "groups": ["ml"]}))
    assert renew(url, found.key, kept[-1], kept.append)[0].startswith("tdm_")  # with the newest refresh token
    assert issuer in repr(signed_in)
    assert signed_in.refresh_token not in repr(signed_in)


def test_a_code_is_taken_once_and_only_with_its_verifier(real: tuple[Path, str, str]):
    _home, issuer, url = real
    seen: list[httpx.Response] = []

    def browse(address: str) -> None:
        assert httpx.URL(address).params["prompt"] == "consent"
        seen.append(httpx.get(address))
        stolen = httpx.URL(seen[0].headers["location"]).params["code"]
        guess = {
            "grant_type": "authorization_code", "code": stolen, "client_id": "tandem-test", "code_verifier": "g" * 43,
            "redirect_uri": str(httpx.URL(seen[0].headers["location"]).copy_with(query=None)),
        }  # fmt: skip
        seen.append(httpx.post(f"{issuer}/token", data=guess))
        wrong = httpx.URL(seen[0].headers["location"]).copy_merge_params({"state": "guessed"})
        threading.Thread(target=lambda: (seen.append(httpx.get(wrong)), httpx.get(seen[0].headers["location"]))).start()

    key, _ = sign_in(url, browse)
    assert seen[1].json()["error"] == "invalid_grant"
    assert seen[2].status_code == 404
    assert key.startswith("tdm_")


def test_a_browser_signs_in_and_comes_back_to_the_dashboard_with_a_key(real: tuple[Path, str, str]):
    _home, issuer, url = real
    with httpx.Client(base_url=url) as browser:
        begun = browser.get("/login")
        assert begun.status_code == 303
        assert begun.headers["location"].startswith(f"{issuer}/authorize?")
        cookie = begun.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        back = httpx.get(begun.headers["location"]).headers["location"]
        assert back.startswith(f"{url}/login/done?")
        from_afar = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        other = httpx.get(back, headers=from_afar)  # a browser that did not begin it: of a victim, for example
        assert (other.status_code, "did not begin" in other.text) == (401, True)
        mixed = browser.get(httpx.URL(back).copy_merge_params({"state": "guessed"}), headers=from_afar)
        assert mixed.status_code == 401
        done = browser.get(back, headers=from_afar)
        page, _, key = done.text.partition("url=")[2].partition('"')[0].partition("#token=")
        assert (done.status_code, page) == (200, f"{url}/")
        assert browser.get("/api/me", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert browser.get(back, headers=from_afar).status_code == 401  # the cookie is gone
        browser.cookies.set("tandem-login", cookie.partition("=")[2].partition(";")[0], path="/login")
        again = browser.get(back, headers=from_afar)
        assert (again.status_code, "does not take the code" in again.text) == (401, True)
        assert browser.get("/login", headers=from_afar).status_code == 403


@browser_only
def test_a_person_signs_in_from_the_dashboard_and_reads_why_not(real: tuple[Path, str, str], tmp_path: Path):
    """In a real browser, which says of each request whose page led to it."""
    home, _issuer, url = real
    with browsing(tmp_path / "profile") as browser:
        page = Page(browser, f"{url}/")
        page.wait_for("document.querySelector('a[href=login]')")
        page.run("document.querySelector('a[href=login]').click()")
        page.wait_for("document.body && document.body.innerText.includes('No run yet')")
        (home / "person.json").write_text(json.dumps({"sub": "p1", "groups": ["gone"]}))
        page.call("Page.navigate", url=f"{url}/login")
        page.wait_for("document.body && document.body.innerText.includes('no grant of this server names a value')")
        (home / "person.json").write_text(json.dumps({"sub": "p1", "groups": ["ml"]}))
        page.run("document.querySelector('a').click()")
        page.wait_for("document.body && document.body.innerText.includes('No run yet')")
