"""The dashboard of a real `tandem control serve`: runs through its agent, keys of several kinds, a real browser."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pages
import pytest
from browser import Browser, Page, browser_only

sys.path.insert(0, str(Path(__file__).parents[1] / "control"))

from whole_way import Control, until

NOWHERE = '[targets.away]\nkind = "ssh"\nhost = "127.0.0.1"\nport = 1\n'  # no one listens there
PARTS = ("", "curves", "answers", "weights", "log", "attempts", "spec")


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    home = tmp_path_factory.mktemp("control")
    here = f'[targets.here]\nkind = "local"\ndirectory = "{home}/jobs"\ntandem = "{home}/tandem"\nusd_per_hour = 3.6\n'
    made = Control(home, here + NOWHERE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ended(control: Control) -> str:
    """A run that has come to its end."""
    run = control.submit(3)
    until(lambda: control.state(run) == "succeeded", 300)
    return run


@pytest.fixture
def waiting(control: Control) -> Iterator[str]:
    """A run whose target does not answer: it never begins."""
    run = control.submit(3, target="away")
    until(lambda: control.state(run) == "starting")
    yield run
    control.ask("POST", f"/api/runs/{run}/cancel", {"save": False})
    until(lambda: control.state(run) == "cancelled")


def url(control: Control) -> str:
    return f"http://127.0.0.1:{control.port}"


def get(control: Control, path: str, token: str) -> httpx.Response:
    return httpx.get(f"{url(control)}/api/views{path}", headers={"Authorization": f"Bearer {token}"}, timeout=30)


def opened(control: Control, browser: Browser, path: str = "") -> Page:
    page = Page(browser, f"{url(control)}/#token={control.token}")
    page.wait_for("document.querySelector('main')")
    page.run(f"void (location.hash = '#/{path}')")
    return page


def click(page: Page, words: str) -> None:
    wanted = f"[...document.querySelectorAll('a, button')].find((each) => each.innerText.trim().startsWith({words!r}))"
    page.wait_for(wanted, 60)
    page.run(f"void {wanted}.click()")


# --- who sees what


def test_the_pages_are_open_and_the_data_is_not(control: Control, ended: str):
    assert ended.encode() not in pages.check_door(url(control))
    every = ("", "/runs", f"/runs/{ended}", f"/runs/{ended}/follow", f"/compare?run={ended}&run={ended}")
    for path in every:
        assert httpx.get(f"{url(control)}/api/views{path}").status_code == 401
        assert get(control, path, control.key("keys")).status_code == 403
    assert get(control, "", control.key("runs:read")).json() == {
        "where": "control server", "pages": ["environments", "targets", "usage"], "may": [],
    }  # fmt: skip
    assert get(control, "", control.token).json()["pages"] == [
        "deployments", "playground", "environments", "targets", "usage", "keys", "audit",
    ]  # fmt: skip


def test_a_key_of_another_project_sees_no_run(control: Control, ended: str):
    control.ask("POST", "/api/projects", {"name": "other"})
    token = control.key("runs:read", project="other")
    assert get(control, "/runs", token).json()["runs"] == []
    for path in (f"/runs/{ended}", *(f"/runs/{ended}/{part}" for part in ("curves", "log", "follow", "versions"))):
        assert get(control, path, token).status_code == 404
    assert get(control, f"/compare?run={ended}&run={ended}", token).status_code == 404


@pytest.mark.parametrize("name", ["%2e%2e", "%2e%2e%2ftoken", "run_nothing", "%00", "run_" + "a" * 26])
def test_no_other_path_is_read(control: Control, name: str):
    for part in ("", "/log", "/curves", "/follow", "/versions"):
        assert get(control, f"/runs/{name}{part}", control.token).status_code in (404, 405)


# --- what it says


def test_the_views_say_what_the_mirror_and_the_control_plane_say(control: Control, ended: str):
    token, mirror = control.token, control.mirror(ended)
    rows = [json.loads(line) for line in (mirror / "metrics.jsonl").read_text().splitlines()]
    found = get(control, f"/runs/{ended}", token).json()
    assert (found["title"], found["run"]) == ("ascii", ended)
    assert (found["stands"]["state"], found["stands"]["liveness"]) == ("succeeded", "ended")
    assert [(each["attempt"], each["target"]) for each in found["attempts"]] == [(1, "here")]
    assert ["Target", "here"] in found["server"]["facts"]
    assert found["spec"] == (mirror / "spec.toml").read_text()
    steps, values = get(control, f"/runs/{ended}/curves", token).json()["series"]["reward/mean"]
    assert [*zip(steps, values, strict=True)] == [(row["step"], row["reward/mean"]) for row in rows]
    answers = get(control, f"/runs/{ended}/answers?first={rows[-1]['step']}", token).json()["answers"]
    assert len(answers) == 8
    [row] = [each for each in get(control, "/runs", token).json()["runs"] if each["run"] == ended]
    assert (row["state"], row["target"], row["step"]) == ("succeeded", "here", rows[-1]["step"])
    assert row["cost_usd"] > 0


def test_a_run_without_files_says_what_it_waits_for(control: Control, waiting: str):
    token = control.token
    found = get(control, f"/runs/{waiting}", token).json()
    assert found["headline"] == "Its job on away is asked for, and has not begun."
    assert "groups_per_step" in found["spec"]
    for part in ("curves", "answers", "versions", "log"):
        assert get(control, f"/runs/{waiting}/{part}", token).status_code == 200


# --- in a browser


@browser_only
def test_every_page_says_nothing_to_the_console(control: Control, ended: str, waiting: str, browser: Browser):
    page = opened(control, browser)
    page.wait_for("document.querySelectorAll('tbody tr').length >= 2", 60)
    assert control.token not in page.run("location.href")
    for run in (ended, waiting):
        for part in PARTS:
            page.run(f"void (location.hash = '#/run/{run}/{part}')")
            here = f"#/run/{run}/{part}".removesuffix("/")
            page.wait_for(f"document.querySelector('.tabs a[aria-current=page][href=\"{here}\"]')", 60)
            page.wait_for("!document.querySelector('main').innerText.includes('Reading the')", 60)
    for part, sees in (
        ("targets", "127.0.0.1"),
        ("usage", "ascii"),
        ("keys", "runs:read"),
        ("audit", "POST /api/runs"),
    ):
        page.run(f"void (location.hash = '#/{part}')")
        page.wait_for(f"document.querySelector('main').innerText.includes({sees!r})", 60)
    assert page.said == []


@browser_only
def test_a_run_is_ended_from_its_page_and_only_after_a_question(control: Control, waiting: str, browser: Browser):
    page = opened(control, browser, f"run/{waiting}")
    click(page, "End this run")
    page.wait_for("document.body.innerText.includes('End it?')", 60)
    assert control.state(waiting) == "starting"
    click(page, "End now")
    page.wait_for("document.querySelector('.pill.cancelled')", 60)
    assert control.state(waiting) == "cancelled"
    click(page, "Resume from")
    until(lambda: control.state(waiting) == "starting")
    assert page.said == []


@browser_only
def test_a_live_page_goes_on_after_the_server_was_killed(control: Control, browser: Browser):
    run = control.submit(20_000)
    until(lambda: control.steps(run) >= 1)
    page = opened(control, browser, f"run/{run}")
    page.wait_for("/Step \\d+/.test(document.body.innerText)", 60)
    control.kill()
    page.wait_for("!document.querySelector('.live.on')", 60)
    seen = control.steps(run)
    control.start()
    page.wait_for("document.querySelector('.live.on')", 60)
    shown: Any = "Number(/Step (\\d+)/.exec(document.body.innerText)?.[1] ?? 0)"
    page.wait_for(f"{shown} > {seen}", 120)
    click(page, "End this run")
    click(page, "Save a checkpoint")
    until(lambda: control.state(run) == "stopped")


@browser_only
def test_models_behind_a_name_are_compared_and_promoted(control: Control, ended: str, browser: Browser):
    """Two checkpoints of a run, asked side by side; then the second gets all requests. A stranger's two questions:
    which weights answered this, and how sure were they."""
    for step in (2, 3):
        control.ask("POST", "/api/deployments", {"name": "support", "run": ended, "step": step})
    until(lambda: all(each["ready"] for each in revisions(control)), 240)
    page = opened(control, browser, "deployments")
    click(page, "Try it")
    page.wait_for("document.getElementById('say')", 60)
    click(page, "Two beside each other")
    changed = "new Event('change', {bubbles: true})"
    for place, name in enumerate(("support@1", "support@2")):
        chosen = f"[...document.querySelectorAll('.talk select')][{place}]"
        page.run(f"{chosen}.value = {name!r}; {chosen}.dispatchEvent({changed})")
    page.run("document.getElementById('say').focus()")
    page.call("Input.insertText", text="hi")
    click(page, "Send")
    page.wait_for("/support@1 · \\d+ token/.test(document.body.innerText)", 60)
    page.wait_for("/support@2 · \\d+ token/.test(document.body.innerText)", 60)
    assert page.run("document.querySelectorAll('.talk .tokens span[title^=logprob]').length") > 1
    page.run("void (location.hash = '#/deployments')")
    click(page, "Promote 2")
    page.wait_for("document.body.innerText.includes('all requests go to this revision')", 60)
    assert [each["weight"] for each in revisions(control)] == [100, 0]
    click(page, "Yes")
    page.wait_for("document.body.innerText.includes('has all requests')", 60)
    until(lambda: [bool(each["weight"]) for each in revisions(control)] == [False, True], 30)
    click(page, "Take it down")
    click(page, "Yes")
    page.wait_for("document.body.innerText.includes('No model has a name yet')", 60)
    assert page.said == []


def revisions(control: Control) -> list[Any]:
    return control.ask("GET", "/api/deployments/support")["revisions"]
