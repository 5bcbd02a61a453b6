"""What every page for people promises, whichever service sends it."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx
from browser import Browser, Page

HOSTILE = (
    "<script>window.owned=1;document.title='owned'</script>",
    "<img src=x onerror='window.owned=1;alert(1)'>",
    "</pre></div><svg onload=alert(1)><iframe srcdoc='<script>parent.owned=1</script>'></iframe>",
    "<form action='https://evil.example'><input autofocus onfocus=alert(1)></form><base href='https://evil.example/'>",
    "{{7*7}} ${alert(1)} javascript:alert(1) \u202eevil",
)


def entered(browser: Browser, url: str, token: str) -> Page:
    page = Page(browser, f"{url}/")
    page.wait_for("document.getElementById('token')")
    page.run("document.getElementById('token').focus()")
    page.type(token)
    page.wait_for("document.getElementById('all') && !document.getElementById('all').hidden")
    return page


def check_door(url: str) -> bytes:
    """Open to whoever loads it, to no other site; the page's bytes."""
    with httpx.Client(base_url=url) as stranger:
        answer = stranger.get("/")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "access-control-allow-origin" not in answer.headers
        assert stranger.get("/", headers={"Host": "evil.example"}).status_code == 421
        assert stranger.get("/", headers={"Origin": "https://evil.example"}).status_code == 403
        assert stranger.get("/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
        assert stranger.post("/").status_code == 405
    return answer.content


def check_policy(url: str) -> None:
    """Its own script runs, and nothing else does."""
    answer = httpx.get(f"{url}/")
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert rules.pop("connect-src") == "'self'"
    assert rules.pop("require-trusted-types-for") == "'script'"
    none = {"default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"}
    assert rules == dict.fromkeys(none, "'none'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"


def check_source(text: str) -> None:
    """It fetches by one call, nothing from elsewhere, and makes no markup of text."""
    for outside in ("://", "src=", "href=", "@import", "url("):
        assert outside not in text
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "localStorage",
    ):
        assert sink not in text
    assert "\n".join(re.findall(r"fetch\(.*", text)) == "fetch(path, {"


def check_wrong_tokens(browser: Browser, url: str, refused: str, key: str) -> None:
    """`refused`: what the page says of a token that is not its service's; `key`: where its tab keeps one."""
    page = Page(browser, f"{url}/")
    page.wait_for("document.getElementById('token')")
    for wrong, said in (("wrong", refused), ("no tokén", "That is no token")):
        page.run("document.getElementById('token').focus()")
        page.type(wrong)
        page.wait_for(f'document.getElementById("trouble").textContent.includes("{said}")')
        assert page.run("sessionStorage.length") == 0
        assert not page.run("document.getElementById('door').hidden")
        assert page.run("document.getElementById('all').hidden")
    page.run(f"sessionStorage.setItem('{key}', 'of another day')")
    page.call("Page.reload")
    page.wait_for("document.getElementById('trouble') && document.getElementById('trouble').textContent")
    assert not page.run("document.getElementById('door').hidden")
    assert page.run("sessionStorage.length") == 0


def check_unharmed(page: Page, title: str, places: str = "#all") -> None:
    """Nothing of what `places` show became an element that does something, and nothing was said."""
    made = "script, img, svg, iframe, form, input, base, style, a"
    assert page.run(f"document.querySelectorAll(':is({places}) :is({made})').length") == 0
    assert page.run("window.owned === undefined && document.title") == title
    assert page.said == []
