"""The online server's page: versions, jobs, loss and a chat with two versions, in a browser over a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pages
import pytest
from browser import Browser, Page, browser_only
from online_served import OnlineServer, online_server
from pages import HOSTILE

SPEC = """
[model]
preset = "tiny"
[train]
lr = 3e-3
[gates]
kl = 100.0
update_norm = 0.6
[replay]
share = 0.0
"""
ANSWER = "<img src=x onerror='window.owned=1'>"


def said(answer: str) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": answer}]}]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnlineServer]:
    """Two versions published, a job rejected, and one version rolled back."""
    with online_server(tmp_path_factory.mktemp("online"), SPEC) as server:
        jobs = [
            server.wait(server.teach(said("Ada did."), steps=25, source="ada")),
            server.wait(server.teach(said(ANSWER), steps=40, source=HOSTILE[0])),
            server.wait(server.teach(said("no"), steps=20, lr=1e-2)),
        ]
        assert [job["state"] for job in jobs] == ["published", "published", "rejected"], jobs
        server.post("/versions/1/activate", {"why": HOSTILE[1]})
        yield server


@pytest.fixture
def server(running: OnlineServer) -> Iterator[OnlineServer]:
    """Version 1 serves before every test."""
    yield running
    if running.get("/train/status")["serving"] != 1:
        running.post("/versions/1/activate")


def url(server: OnlineServer) -> str:
    return str(server.http.base_url).rstrip("/")


def entered(browser: Browser, server: OnlineServer, key: str = "token") -> Page:
    return pages.entered(browser, url(server), (server.data_dir / key).read_text().strip())


def texts(page: Page, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)")


def ask(page: Page, text: str, right: str = "", **settings: Any) -> None:
    """What is served on the left, the version `right` on the right."""
    page.run(f"document.querySelectorAll('#panes select')[1].value = '{right}'")
    for name, value in settings.items():
        page.run(f"document.getElementById('{name}').value = {value}")
    page.run("document.getElementById('say').focus()")
    page.type(text)


def answers(page: Page) -> list[list[str]]:
    """Head and body of each pane's last answer, once both have ended."""
    page.wait_for("document.querySelectorAll('.sampled').length > 1 && !document.getElementById('send').disabled")
    last = "[...document.querySelectorAll('.pane')].map((each) => [...each.querySelectorAll('.sampled')].at(-1))"
    return page.run(f"{last}.map((each) => [...each.children].map((child) => child.textContent))")


@browser_only
def test_a_wrong_token_is_said_and_forgotten(browser: Browser, server: OnlineServer):
    pages.check_wrong_tokens(browser, url(server), "not this server's token", "tandem-online-token")


@browser_only
def test_before_a_token_it_shows_nothing_and_after_it_what_is_served(browser: Browser, server: OnlineServer):
    page = Page(browser, f"{url(server)}/")
    page.wait_for("document.getElementById('token')")
    assert page.text.split() == ["tandem", "Online", "not", "connected", "Learning", "while", "serving", "Show"]
    page = entered(browser, server)
    facts = dict(zip(texts(page, "#facts dt"), texts(page, "#facts dd"), strict=True))
    status = server.get("/train/status")
    assert facts == {
        "model": "online",
        "served": "version 1",
        "trainer": f"alive, {status['trainer']['parameters']:,} parameters",
        "now": "nothing is trained",
        **{f"jobs {state}": str(number) for state, number in status["jobs"].items()},
        "checkpoint": f"version {status['checkpointed']}",
    }
    assert status["jobs"]["rejected"] == 1
    page.call("Page.reload")
    page.wait_for("document.getElementById('all') && !document.getElementById('all').hidden")
    assert page.run("document.getElementById('door').hidden")
    assert page.run("document.cookie + JSON.stringify(localStorage) + location.href") == f"{{}}{url(server)}/"
    assert page.said == []


@browser_only
def test_versions_are_a_timeline_with_the_rollback_and_what_serves_is_marked(browser: Browser, server: OnlineServer):
    page = entered(browser, server)
    rows = page.run(
        "[...document.querySelectorAll('#timeline tr')].map((row) => [...row.cells].map((c) => c.innerText))"
    )
    assert rows[0] == ["version", "what", "when", "by", "written", "digest as served"]
    assert [row[0] for row in rows if "●" in row[0]] == [rows[1][0]] == ["1 ●"]
    kept = {each["version"]: each for each in server.get("/versions")["versions"]}
    made = [(f"job {kept[n]['job'][:8]}", kept[n]["served_digest"]) for n in (1, 2)]
    assert [(row[0].removesuffix(" ●"), row[1], row[3], row[5]) for row in rows[-4:]] == [
        ("1", "rolled back, from 2", f"admin: {HOSTILE[1]}", ""),
        ("2", "published, from 1", *made[1]),
        ("1", "published, from 0", *made[0]),
        ("0", "the first", "", kept[0]["served_digest"]),
    ]
    points = (
        "[...document.querySelectorAll('#steps circle')].map((each) => [each.className.baseVal, each.cy.baseVal.value])"
    )
    classes, heights = zip(*page.run(points), strict=True)
    assert classes[:3] == ("", "", "")
    assert classes[3].startswith("back")
    assert [cls for cls in classes if "now" in cls] == [classes[-1]]
    assert heights[0] > heights[1] == heights[3] > heights[2], "a version is higher up than those before it"
    assert texts(page, "#steps title")[2:4] == ["version 2: published, from 1", "version 1: rolled back, from 2"]
    assert page.run("document.getElementById('missing').textContent") == ""
    assert page.said == []


@browser_only
def test_another_version_is_served_after_a_question_and_only_by_a_key_that_may(browser: Browser, server: OnlineServer):
    page = entered(browser, server)
    page.wait_for("!document.getElementById('serve').hidden")
    assert texts(page, "#other option") == ["version 2", "version 0"]

    def ask_for(page: Page, version: int, then: str) -> None:
        page.run(f"document.getElementById('other').value = '{version}'")
        page.run("document.querySelector('#serve button').click()")
        page.wait_for("!document.getElementById('sure').hidden")
        page.run(f"document.getElementById('why').value = {HOSTILE[1]!r}")
        page.run(f"document.querySelector('#sure {then}').click()")
        page.wait_for("document.getElementById('sure').hidden")

    ask_for(page, 2, "#no")
    assert "goes forward again" in texts(page, "#asked")[0]
    assert server.get("/train/status")["serving"] == 1
    ask_for(page, 0, "button.main")
    page.wait_for("document.querySelector('#timeline td').textContent == '0 ●'")
    assert server.get("/train/status")["serving"] == 0
    assert texts(page, "#timeline td")[3] == f"admin: {HOSTILE[1]}"
    assert texts(page, "#other option") == ["version 2", "version 1"]
    server.post("/versions/1/activate")
    page.wait_for("document.querySelector('#timeline td').textContent == '1 ●'")
    trainer = entered(browser, server, "token-train")
    trainer.wait_for("!document.getElementById('serve').hidden")
    ask_for(trainer, 2, "button.main")
    trainer.wait_for("document.getElementById('trouble').textContent.includes('Version 2 is not served: the key')")
    assert server.get("/train/status")["serving"] == 1
    assert page.said == []


@browser_only
def test_jobs_open_to_their_gates_and_stay_open(browser: Browser, server: OnlineServer):
    page = entered(browser, server)
    assert [text.split(" · ")[0] for text in texts(page, "#jobs summary")][-3:] == [
        "rejected",
        "published",
        "published",
    ]
    page.run("[...document.querySelectorAll('#jobs summary')].at(-3).click()")
    page.wait_for("document.querySelector('#jobs details[open] table')")
    shown = page.run("document.querySelector('#jobs details[open]').innerText")
    job = server.get("/train/jobs")["jobs"][-3]
    for text in (
        job["why"],
        "sft, 20 steps, lr 0.01",
        "gate\t\tvalue\tlimit\twhat it says",
        "finite\tpassed\t0\t0\tall",
    ):
        assert text in shown
    assert page.run("location.hash") == f"#job={job['id']}"
    (gate,) = [gate for gate in job["gates"] if not gate["passed"]]
    assert f"update_norm\tnot passed\t{gate['value']:.4g}\t0.6\t{gate['text']}" in shown
    server.wait(server.teach(said("x"), steps=1, lr=1e-2, kl_coef=0.0, source="later"))
    page.wait_for("document.getElementById('jobs').innerText.includes('later')")
    assert page.run("document.querySelector('#jobs details[open]').innerText") == shown
    page.call("Page.reload")  # as one who was sent the address
    page.wait_for("document.querySelector('#jobs details[open]')")
    assert page.run("document.querySelector('#jobs details[open]').innerText") == shown
    assert page.said == []


@browser_only
def test_the_loss_of_jobs_that_ended_and_of_the_one_that_runs(browser: Browser, server: OnlineServer):
    page = entered(browser, server)
    ended = [job for job in server.get("/train/jobs")["jobs"] if "loss/total" in job["metrics"]][::-1]
    shown = [f"{job['id'][:8]}, sft, {job['state']}: {job['metrics']['loss/total']:.4g}" for job in ended]
    assert texts(page, "#ended title") == shown
    assert page.run("document.getElementById('running').style.display") == "none"
    job = server.teach(said("Ada did."), steps=1000, lr=1e-6)
    page.wait_for("document.querySelectorAll('#running circle').length > 1")
    assert f"Job {job[:8]} while this page looked" in page.run("document.getElementById('losses').textContent")
    assert f"job {job[:8]}, step " in page.run("document.getElementById('facts').textContent")
    server.post(f"/train/jobs/{job}/cancel")
    page.wait_for("document.getElementById('running').style.display == 'none'")
    assert page.said == []


@browser_only
def test_two_versions_answer_side_by_side_each_after_its_own_answers(browser: Browser, server: OnlineServer):
    page = entered(browser, server)
    assert page.run("document.querySelectorAll('#panes select')[1].value") == "0", "the one before what is served"
    ask(page, "Who?", right="2")
    assert answers(page) == [["version 1, 9 tokens", "Ada did."], ["version 2, 37 tokens", ANSWER]]
    heads = "[...document.querySelectorAll('.pane')].map((each) => each.querySelectorAll('.turn').length)"
    assert page.run(heads) == [2, 2]
    ask(page, "and?", right="2", most=5)
    shown, user = answers(page), [{"role": "user", "content": text} for text in ("Who?", "and?")]
    for version, before, (head, text) in zip((1, 2), ("Ada did.", ANSWER), shown, strict=True):
        messages = [user[0], {"role": "assistant", "content": before}, user[1]]
        chat = {"model": "online", "messages": messages, "max_tokens": 5, "temperature": 0}
        told = server.http.post(f"/versions/{version}/v1/chat/completions", json=chat).raise_for_status().json()
        assert text == told["choices"][0]["message"]["content"]
        assert head == f"version {version}, {told['usage']['completion_tokens']} tokens"
    page.run("document.getElementById('clear').click()")
    assert page.run(heads) == [0, 0]
    assert page.said == []


@browser_only
def test_an_answer_is_shown_as_it_comes_across_an_update_and_may_be_stopped(browser: Browser, server: OnlineServer):
    server.post("/versions/0/activate")
    page = entered(browser, server)
    under_way = (
        "document.querySelector('.sampled:last-child pre')?.textContent && document.getElementById('send').disabled"
    )
    ask(page, "long", right="0", most=400)
    page.wait_for(under_way)
    server.post("/versions/2/activate")
    (left, _), (right, _) = answers(page)
    spans = [part.split(", ") for part in left.split(" · ")]
    assert [version for version, _ in spans] == ["version 0", "version 2"], left
    assert right == "version 0, 400 tokens"
    page.run("document.getElementById('clear').click()")
    ask(page, "long", right="0", most=400)
    page.wait_for(under_way)
    page.run("document.getElementById('stop').click()")
    assert answers(page)[1][0] == "stopped"
    server.post("/versions/1/activate")
    page.wait_for("document.querySelector('#timeline td').textContent == '1 ●'")
    assert page.said == []


@browser_only
def test_what_others_wrote_is_text_and_runs_nothing(browser: Browser, server: OnlineServer):
    page = entered(browser, server)
    page.run("document.querySelectorAll('#jobs summary').forEach((each) => each.click())")
    ask(page, HOSTILE[3], right="2")
    answers(page)
    ask(page, "Who?", right="2")
    answers(page)
    assert texts(page, ".pane:last-child .turn:first-child pre") == [HOSTILE[3]]
    assert HOSTILE[0] in "".join(texts(page, "#jobs summary"))
    assert HOSTILE[1] in "".join(texts(page, "#timeline td"))
    pages.check_unharmed(page, "online · tandem", "#jobs, #panes, #timeline, #facts, #losses")


@browser_only
def test_a_key_sees_what_it_may_and_is_told_what_it_may_not(browser: Browser, server: OnlineServer):
    page = entered(browser, server, "token-infer")
    for text in ("This key may not list versions.", "This key may not list jobs.", "version 1"):
        assert text in page.text
    assert "No job has ended" not in page.text
    assert texts(page, "#timeline td") == texts(page, "#jobs details") == []
    assert texts(page, "select:first-child option") == ["what is served, now version 1"] * 2
    ask(page, "Who?")
    assert answers(page) == [["version 1, 9 tokens", "Ada did."]] * 2
    page = entered(browser, server, "token-train")
    assert "This key may not read the audit: rollbacks are missing here." in page.text
    assert "rolled back" not in page.text
    ask(page, "Who?", right="2")
    left, (why, nothing) = answers(page)
    assert (left, nothing) == (["version 1, 9 tokens", "Ada did."], "")
    assert why.startswith("no answer: the key 'train' may not do this")
    assert all("403" in line for line in page.said), page.said
