"""Four questions of somebody who sees the dashboard for the first time, each in three clicks from the first page.

The runs are real. A click is a click of the mouse on what lies at that place of the screen. All of them are counted,
those into a field as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from browser import Browser, Page, browser_only

from tandem.dashboard.service import dashboard_service
from tandem.io.kept_samples import samples
from tandem.runs.compare import compare_runs, pairing_text
from tandem.serve.http.run import Listen, Server
from tandem.serve.http.service import create_app

SCORE = """
def letters(reply, target):
    return sum(character.isalpha() for character in reply) / (len(reply) + 1)


def nothing(reply, target):
    return 0.0
"""
WAY = 3


def spec(place: Path, reward: str, steps: int, lr: float) -> dict[str, Any]:
    data = {"path": str(place / "q.jsonl"), "columns": {"completion": "shown"}, "eval_share": 0.4}
    params = {"data": data, "reward": f"{place}/score.py:{reward}"}
    return {
        "recipe": "rl",
        "model": {"preset": "tiny"},
        "environment": {"name": "prompts", "params": params},
        "train": {"steps": steps, "lr": lr, "groups_per_step": 2, "group_size": 4, "max_tokens": 8},
        "eval": {"tasks": 16},
        "device": "cpu",
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forked_programs: None) -> Path:
    """A, a better B, and one that failed."""
    home, found = tmp_path_factory.mktemp("specs"), tmp_path_factory.mktemp("runs")
    (home / "score.py").write_text(SCORE)
    rows = [{"question": f"say {n}", "target": str(n), "shown": "abc"} for n in range(40)]
    (home / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"A": ("letters", 32, 1e-5, 0), "B": ("letters", 40, 5e-3, 0), "broken": ("nothing", 40, 1e-3, 1)}
    for name, (reward, steps, lr, code) in given.items():
        (home / f"{name}.toml").write_text(tomli_w.dumps(spec(home, reward, steps, lr)))
        command = [sys.executable, "-P", "-m", "tandem", "train", str(home / f"{name}.toml")]
        done = subprocess.run(
            [*command, "--run-dir", str(found / name)], capture_output=True, text=True, timeout=300, check=False
        )
        assert bool(done.returncode) == bool(code), done.stderr
    return found


@pytest.fixture(scope="module")
def served(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    listen = Listen(tmp_path_factory.mktemp("home"))
    server = Server(
        create_app(dashboard_service(runs), token=listen.token(), hosts=listen.hosts), listen, tell=lambda _: None
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"{server.url}/#token={listen.token()}"
    server.should_exit = True
    thread.join()


class Stranger:
    """Somebody with a mouse, who counts."""

    def __init__(self, browser: Browser, address: str, width: int) -> None:
        self.page, self.clicks = Page(browser, address), 0
        self.page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.page.wait_for("document.querySelectorAll('tbody tr').length === 3")

    def click(self, element: str) -> None:
        """Click the element of a JavaScript expression, where it is on the screen."""
        self.page.wait_for(element)
        self.page.run(f"{element}.scrollIntoView({{block: 'center'}})")
        time.sleep(0.1)
        x, y = self.page.run(f"(at => [at.x + at.width / 2, at.y + at.height / 2])({element}.getBoundingClientRect())")
        here = f"document.elementFromPoint({x}, {y})"
        assert self.page.run(f"Boolean({here}) && {element}.contains({here})"), (
            f"{element} is covered, or off the screen"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.page.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, x=x, y=y)
        self.clicks += 1

    def click_on(self, words: str) -> None:
        """Click the link or button with these words, the first that is seen."""
        self.click(
            f"[...document.querySelectorAll('a, button')].find((each) => each.innerText.trim().startsWith({words!r})"
            " && each.checkVisibility())"
        )

    def sees(self, *texts: str) -> None:
        for text in texts:
            self.page.wait_for(f"document.querySelector('main').innerText.includes({text!r})")
        assert self.clicks <= WAY, f"{self.clicks} clicks"
        assert self.page.said == []


@pytest.fixture(params=[1440, 390])
def stranger(browser: Browser, served: str, request: pytest.FixtureRequest) -> Iterator[Stranger]:
    made = Stranger(browser, served, request.param)
    yield made
    made.page.close()


@browser_only
def test_why_did_this_run_fail(stranger: Stranger):
    stranger.click_on("broken")
    stranger.sees("no token of the batch had any credit", "answers are cut off at 8 tokens")


@browser_only
def test_is_b_better_than_a(stranger: Stranger, runs: Path):
    for name in ("A", "B"):
        stranger.click(f"document.querySelector('[aria-label=\"Compare {name}\"]')")
    stranger.click_on("Compare 2 runs")
    [pairing] = compare_runs([runs / "A", runs / "B"]).pairings
    assert pairing.verdict is not None
    stranger.sees("Is it better?", pairing.verdict.verdict, pairing_text(pairing))


@browser_only
def test_what_did_the_model_say_at_step_30(stranger: Stranger, runs: Path):
    stranger.click_on("A")
    stranger.click_on("Answers")
    stranger.click("document.querySelector('main input[type=number]')")
    stranger.page.run("document.activeElement.select()")
    stranger.page.type("30")
    said = samples(runs / "A", steps=30)
    assert len(said) == 8
    stranger.page.wait_for("document.querySelectorAll('.answer').length === 8")
    stranger.page.wait_for("document.querySelector('main h2').innerText.startsWith('step 30 ·')")
    stranger.sees(*(f"reward {each['reward']:.4g}" for each in said))


@browser_only
def test_which_weights_answered_this(stranger: Stranger, runs: Path):
    stranger.click_on("A")
    stranger.click_on("Answers")
    stranger.click_on("version ")
    ledger = [json.loads(line) for line in (runs / "A/sync.jsonl").read_text().splitlines()]
    newest = samples(runs / "A", steps=32)[0]["version"]
    [digest] = [each["digest"] for each in ledger if each["version"] == newest]
    stranger.page.wait_for("document.querySelector('tr[aria-current=true]')")
    row = stranger.page.run("document.querySelector('tr[aria-current=true]').innerText").split()
    assert (row[0], row[2]) == (str(newest), digest[:16])
    assert stranger.page.run("document.querySelector('tr[aria-current=true]').getBoundingClientRect().bottom") < 900
    stranger.sees("Did the engines serve the trainer's weights?")
