"""The dashboard's page of environments, in a browser: real pushes to a real server, hostile ones and many."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pages
import pytest
from browser import Browser, Page, browser_only
from pages import HOSTILE

sys.path.insert(0, str(Path(__file__).parents[1] / "control"))

from plane import TOKEN
from test_client import Running
from wheels import wheel


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.server.should_exit = True
    made.thread.join()


def push(running: Running, place: Path, name: str, version: str, summary: str = "shouts") -> str:
    """Push a wheel; return its SHA-256."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\nRequires-Python: >=3.11\n"
    file, content = wheel(name, version, metadata=metadata)
    (place / file).write_bytes(content)
    with running.client() as client:
        checks = {"tasks": 40, "reward": 0.41}
        return client.push_environment(place / file, build={"tool": HOSTILE[0][:60]}, checks=checks).sha256


def opened(running: Running, browser: Browser, path: str) -> Page:
    page = Page(browser, f"{running.server.url}/#token={TOKEN}")
    page.wait_for("document.querySelector('main')")
    page.run(f"void (location.hash = '#/{path}')")
    return page


def cards(page: Page) -> list[str]:
    return page.run("[...document.querySelectorAll('section.card')].map((each) => each.innerText)")


@browser_only
def test_versions_yanks_and_origins_are_shown_as_they_come(running: Running, browser: Browser, tmp_path: Path):
    page = opened(running, browser, "environments")
    page.wait_for("document.body.innerText.includes('No environment was pushed yet')")
    digests = {
        version: push(running, tmp_path, "default-shout", version) for version in ("1.0", "1.1", "1.2", "1.3rc1")
    }
    push(running, tmp_path, "default-evil", "1.0", HOSTILE[1] + "w" * 2000)
    with running.client() as client:
        client.yank_environment("default/shout==1.2", why=HOSTILE[1])
    page.wait_for("document.body.innerText.includes('yanked')", 30)  # without a reload
    evil, shout = cards(page)
    assert 'name = "default/shout==1.1"' in shout
    assert [line.split("\t")[:2] for line in shout.splitlines() if line[:2] == "1."] == [
        ["1.3rc1", "a trial"], ["1.2", f"yanked {HOSTILE[1]}"], ["1.1", "default"], ["1.0", "older"],
    ]  # fmt: skip
    assert len(evil) < 900
    at = "[...document.querySelectorAll('button')].find((each) => each.textContent === 'Where from is 1.1')"
    page.run(f"void {at}.click()")
    page.wait_for("document.querySelector('.origin dl')")
    origin = page.run("document.querySelector('.origin').innerText")
    for text in ("operator of default", ">=3.11", "0.41", digests["1.1"], "tandem env verify default/shout==1.1"):
        assert text in origin
    assert HOSTILE[0][:60] in origin
    assert page.run("location.hash") == "#/environments?show=default-shout%401.1"
    pages.check_unharmed(page, "Environments · tandem", "section.card")
    again = opened(running, browser, "environments?show=default-shout%401.0&q=shout")  # a link that was sent
    again.wait_for(f"document.querySelector('.origin')?.innerText.includes('{digests['1.0']}')")
    assert len(cards(again)) == 1
    for each in (page, again):
        each.close()


@browser_only
def test_a_long_list_is_cut_filtered_and_fits_every_screen(running: Running, browser: Browser, tmp_path: Path):
    for n in range(25):
        push(running, tmp_path, f"default-pack{n:02}", "1.0")
    page = opened(running, browser, "environments")
    page.wait_for("document.querySelectorAll('section.card').length === 20")
    page.run("document.getElementById('packages').focus()")
    page.call("Input.insertText", text="pack2")
    page.wait_for("document.querySelectorAll('section.card').length === 5")
    assert "5 of 25" in page.text
    page.run("void (document.getElementById('packages').value = '')")
    page.run("void document.getElementById('packages').dispatchEvent(new Event('input', {bubbles: true}))")
    page.wait_for("[...document.querySelectorAll('button')].some((each) => each.innerText === 'Show all 25')")
    page.run("void [...document.querySelectorAll('button')].find((each) => each.innerText === 'Show all 25').click()")
    page.wait_for("document.querySelectorAll('section.card').length === 25")
    for width in (1440, 1024, 390):
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), width
    assert page.said == []
    page.close()
