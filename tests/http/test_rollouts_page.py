"""The rollout service's page: who may load it, and what it shows in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pages
import pytest
from browser import Browser, Page, browser_only
from malformed_groups import good
from pages import HOSTILE
from rollouts_process import rollouts_process
from rollouts_served import RolloutClient, serving_rollouts


@pytest.fixture
def client(tmp_path: Path) -> Iterator[RolloutClient]:
    with serving_rollouts(tmp_path) as client:
        client.begin()
        yield client


def entered(browser: Browser, client: RolloutClient) -> Page:
    return pages.entered(browser, client.url, client.http.headers["authorization"].removeprefix("Bearer "))


# --- as it is sent


def test_the_page_is_open_and_holds_nothing(client: RolloutClient):
    before = pages.check_door(client.url)
    client.post("/v2/groups", {"groups": [good()]})
    assert pages.check_door(client.url) == before
    assert httpx.get(f"{client.url}/v2/status").status_code == 401


def test_its_policy_lets_its_own_script_run_and_nothing_else(client: RolloutClient):
    pages.check_policy(client.url)


def test_it_fetches_nothing_from_elsewhere_and_makes_no_markup_of_text(client: RolloutClient):
    text = client.http.get("/").text
    pages.check_source(text)
    assert "method:" not in text, "it only reads"


# --- in a browser


@browser_only
def test_it_asks_for_the_token_once_and_shows_the_numbers(browser: Browser, client: RolloutClient):
    tickets = client.post("/v2/tickets", {"environment": 1, "count": 4})["tickets"]
    for ticket in tickets[:2]:
        client.post("/v2/groups", {"groups": [good() | {"ticket": ticket}]})
    client.post(f"/v2/tickets/{tickets[2]}/drop", {"environment": 1, "reason": "no_signal"})
    page = entered(browser, client)
    for text in ("version 0 · max_lag 1 · epoch 1", "2 of at most", "env_0\t1\t100.0 %\t–\t2\t1\tno_signal 1"):
        assert text in page.text
    client.post("/v2/groups", {"groups": [good()]})
    client.post("/v2/leases", {"epoch": client.epoch, "groups": 1, "version": 1})
    page.wait_for("document.body.innerText.includes('version 1 · max_lag')")
    assert "env_0\t1\t100.0 %\t100.0 %\t2\t1\tno_signal 1" in page.text
    page.call("Page.reload")
    page.wait_for("document.getElementById('all') && !document.getElementById('all').hidden")
    assert page.run("document.getElementById('door').hidden")
    assert page.run("document.cookie + JSON.stringify(localStorage) + location.href") == f"{{}}{client.url}/"
    assert page.said == []


@browser_only
def test_a_wrong_token_is_said_and_forgotten(browser: Browser, client: RolloutClient):
    pages.check_wrong_tokens(browser, client.url, "not this service's token", "tandem-rollouts-token")


@browser_only
def test_it_shows_what_was_said_or_its_ids_with_reward_versions_and_lag(browser: Browser, client: RolloutClient):
    one = good()["trajectories"][0] | {
        "ids": [5] * 500, "logprobs": [0] * 2 + [-1] * 498, "trained": [0] * 2 + [1] * 498,
        "spans": [[-1, 2], [0, 98], [1, 400]], "reward": 0.25, "messages": [], "status": "truncated",
    }  # fmt: skip
    unknown = one | {"spans": [[-1, 2], [-2, 498]]}
    client.post("/v2/trainer", {"run_id": "run", "groups_per_step": 4, "max_lag": 2, "version": 1, "num_ids": 1000})
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "add"}]}]
    talk = good()["trajectories"][0] | {"messages": said}
    client.post("/v2/groups", {"groups": [{"environment": 1, "trajectories": [one, unknown]}]})
    client.post("/v2/groups", {"groups": [{"environment": 1, "trajectories": [talk, talk]}]})
    page = entered(browser, client)
    page.wait_for("document.querySelectorAll('.play').length == 2")
    shown = page.run("document.querySelector('.play').innerText")
    for text in ("reward 1 · finished · version 0 · 3 of 4 tokens trained", "user\n2+2?", "assistant\n", '"id": "add"'):
        assert text in shown
    page.run("document.querySelector('#groups button:last-child').click()")
    page.wait_for("document.body.innerText.includes('some versions unknown')")
    shown = page.run("document.getElementById('group').innerText")
    for text in (
        "group 1 · env_0 · place 1 · lag 1 · some versions unknown",
        "reward 0.25 · truncated · version 0, 1 · 498 of 500",
        "2 ids, given\n5 5\n", "498 ids, trained\n" + " ".join(["5"] * 398) + "\n", "and 100 ids more",
    ):  # fmt: skip
        assert text in shown, shown
    assert page.run("document.querySelector('#groups [aria-pressed=true]').textContent") == "1"
    assert page.run("location.hash") == "#group=1"
    page.call("Page.reload")  # as one who was sent the address
    page.wait_for("document.getElementById('group')?.innerText.includes('group 1 · env_0')")
    assert page.said == []


@browser_only
def test_a_hostile_trajectory_is_text_and_runs_nothing(browser: Browser, client: RolloutClient):
    messages: list[dict[str, Any]] = [{"role": text, "content": text} for text in HOSTILE]
    messages += [{"role": "assistant", "content": [{"type": HOSTILE[0]}], HOSTILE[1]: HOSTILE[1]}]
    one = good()["trajectories"][0] | {"messages": messages, "task_id": HOSTILE[0], "extra": {HOSTILE[1]: HOSTILE[0]}}
    client.post("/v2/groups", {"groups": [{"environment": 1, "trajectories": [one, one]}]})
    refused = {"groups": [good() | {HOSTILE[1][:60]: 1}]}
    assert client.send("/v2/groups?environment=1", refused).status_code == 422
    page = entered(browser, client)
    page.wait_for("document.querySelectorAll('.play').length == 2")
    shown = page.run("[...document.querySelectorAll('.play pre')].slice(0, 5).map((each) => each.textContent)")
    assert shown == list(HOSTILE)
    assert HOSTILE[1][:60] in page.run("document.getElementById('quarantine').textContent")
    pages.check_unharmed(page, "rollouts · tandem")


@browser_only
def test_even_a_mistake_of_its_script_would_let_no_markup_in_and_no_number_out(browser: Browser, client: RolloutClient):
    page = entered(browser, client)
    refused = "(() => { try { document.body.innerHTML = '<b>in</b>'; return 'let in' } catch { return 'refused' } })()"
    assert page.run(refused) == "refused"
    page.run("document.body.append(Object.assign(document.createElement('style'), {textContent: 'body {color: red}'}))")
    assert page.run("fetch('http://localhost:9/').catch(() => 'refused')") == "refused"
    assert page.run("Object.assign(new Image(), {src: 'http://localhost:9/x.png'}) && 1") == 1
    for rule in ("TrustedHTML", "style-src", "connect-src", "default-src"):
        assert any(rule in line for line in page.said), (rule, page.said)


@browser_only
def test_it_goes_on_over_a_service_that_is_killed_and_started_again(browser: Browser, tmp_path: Path):
    with rollouts_process(tmp_path, "--port", "0") as client:
        client.begin()
        client.post("/v2/groups", {"groups": [good()]})
        page, port = entered(browser, client), client.url.rpartition(":")[2]
        page.wait_for("document.querySelectorAll('.play').length == 2")
    page.wait_for("document.getElementById('trouble').textContent.startsWith('No answer since')")
    assert "1 of at most" in page.text
    with rollouts_process(tmp_path, "--port", port) as client:
        client.post("/v2/groups", {"groups": [good()]})
        page.wait_for("document.getElementById('trouble').hidden && document.body.innerText.includes('2 of at most')")
