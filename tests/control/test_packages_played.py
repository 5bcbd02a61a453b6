"""From one's own function to a colleague's run: push, pip, uv, a run, a yank, a resume, a run by an agent."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wheels import CODE, wheel
from whole_way import Control, until

from tandem.client import Tandem
from tandem.runs.environment_packages import PINS
from tandem.spec.load import parse_spec, to_toml

PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "default-shout"
version = "1.2.0"
description = "Answer in capitals."
requires-python = ">=3.11"

[project.entry-points."tandem.environments"]
shout = "shout_env:Shout"

[tool.setuptools]
py-modules = ["shout_env"]
"""
NAME = "default/shout==1.2.0"

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


class Colleagues:
    """A server, and the commands of its users."""

    def __init__(self, home: Path) -> None:
        self.home, self.control = home, Control(home)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))} | {
            "TANDEM_CONTROL": str(home / "data"), "XDG_CACHE_HOME": str(home / "cache"), "HOME": str(home),
        }  # fmt: skip
        (home / "shout").mkdir()
        (home / "shout/pyproject.toml").write_text(PROJECT)
        (home / "shout/shout_env.py").write_text(CODE)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-P", "-m", "tandem", *words]

    def tandem(self, *words: str, code: int = 0) -> str:
        told = subprocess.run(
            self.command(*words), cwd=self.home, env=self.env, capture_output=True, text=True, timeout=200
        )
        assert told.returncode == code, (words, told.stdout[-2000:], told.stderr[-2000:])
        return told.stdout if "--json" in words else told.stdout + told.stderr

    def spec(self, steps: int, file: str = "spec.toml", **environment: Any) -> str:
        tables = {
            "recipe": "rl", "name": "shouts", "device": "cpu", "model": {"preset": "tiny"},
            "environment": {"name": NAME, **environment},
            "train": {"steps": steps, "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "max_tokens": 6},
            "eval": {"tasks": 4}, "checkpoint": {"every": 1, "keep_every": 1000},
        }  # fmt: skip
        (self.home / file).write_text(to_toml(parse_spec(tables)))
        return file


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Colleagues]:
    made = Colleagues(tmp_path_factory.mktemp("team"))
    made.tandem("env", "push", "shout")
    yield made
    made.control.close()


def sha_of(team: Colleagues) -> str:
    with Tandem(f"http://127.0.0.1:{team.control.port}", team.control.token) as server:
        return server.environment("default/shout").versions[0].sha256


def test_a_directory_is_pushed_listed_and_verified(team: Colleagues):
    pushed = json.loads(team.tandem("env", "push", "shout", "--json"))  # built again: the same bytes, or it is refused
    assert (pushed["title"], pushed["version"]) == ("default/shout", "1.2.0")
    listed = json.loads(team.tandem("env", "list", "--index", "--json"))
    assert pushed["sha256"] in [each["versions"][0]["sha256"] for each in listed]
    told = json.loads(team.tandem("env", "verify", NAME, "--json"))
    checks = told["provenance"]["checks"]
    assert (told["sha256"], checks["train tasks"], checks["loaded in"]) == (pushed["sha256"], 40, "bwrap")
    assert "is not signed by the server's key" in team.tandem("env", "verify", NAME, "--key", "0" * 64, code=2)
    shown = team.tandem("env", "verify", NAME, "--key", str(team.home / "data/signing-key.pub"))
    assert "RECORD      1 files of its code" in shown


def test_the_environment_of_the_page_is_one(team: Colleagues):
    page = (Path(__file__).parents[2] / "docs/packages.md").read_text()
    code, project = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("python", "text"))
    (team.home / "page").mkdir()
    (team.home / "page/shout_env.py").write_text(code)
    (team.home / "page/pyproject.toml").write_text(project.replace("acme-shout", "default-page"))
    assert json.loads(team.tandem("env", "push", "page", "--json"))["title"] == "default/page"


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_pip_and_uv_install_the_very_file(team: Colleagues, tmp_path: Path, tool: str):
    reader = team.control.key("runs:read")
    index = f"http://me:{reader}@127.0.0.1:{team.control.port}/simple/"
    (tmp_path / "pins.txt").write_text(f"default-shout==1.2.0 --hash=sha256:{sha_of(team)}\n")
    options = ["--index-url", index, "--no-deps", "--require-hashes", "-r", str(tmp_path / "pins.txt")]
    start = [sys.executable, "-m", "uv", "pip", "install", "--no-cache", "--python", sys.executable]
    if tool == "pip":
        start = [sys.executable, "-I", "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check"]
    subprocess.run([*start, *options, "--target", str(tmp_path / "site")], env=team.env, check=True, timeout=120)
    assert (tmp_path / "site/shout_env.py").read_text() == CODE
    if tool == "pip":
        down = [sys.executable, "-I", "-m", "pip", "download", "--no-cache-dir", "--disable-pip-version-check"]
        subprocess.run([*down, *options, "-d", str(tmp_path / "down")], env=team.env, check=True, timeout=120)
        (file,) = (tmp_path / "down").iterdir()
        assert hashlib.sha256(file.read_bytes()).hexdigest() == sha_of(team)


def test_a_run_goes_on_with_what_it_keeps_after_a_yank(team: Colleagues):
    team.spec(30)
    run = team.home / "first"
    begun = subprocess.Popen(
        team.command("train", "spec.toml", "--run-dir", str(run), "--quiet"), cwd=team.home, env=team.env
    )
    try:
        until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(b"\n") > 1, 120)
        begun.send_signal(signal.SIGTERM)
        begun.wait(60)
    finally:
        begun.kill()
        begun.wait()
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    pins = json.loads((run / "environment" / PINS).read_text())
    assert [(each["name"], each["sha256"]) for each in pins["packages"]] == [("default-shout", sha_of(team))]
    file = run / "environment" / pins["packages"][0]["file"]
    team.tandem("env", "yank", NAME, "--why", "wrong rewards")
    try:
        assert "was yanked (wrong rewards)" in team.tandem("train", "spec.toml", "--run-dir", "second", code=2)
        shutil.rmtree(team.home / "cache")
        right = file.read_bytes()
        file.write_bytes(wheel("default-shout", "1.2.0", code="class Shout: tasks = run = 1\n")[1])
        assert "is not the wheel that" in team.tandem("resume", str(run), code=2)
        file.write_bytes(right)
        (team.home / "data/packages" / f"{sha_of(team)}.whl").rename(team.home / "gone.whl")  # no index is asked
        team.tandem("resume", str(run), "--quiet")
        assert json.loads((run / "status.json").read_text())["state"] == "succeeded"
        team.spec(2, "again.toml", pins=str(run / "environment"))
        team.tandem("train", "again.toml", "--run-dir", "again", "--quiet")
        assert (team.home / "again/environment" / file.name).read_bytes() == right
        assert json.loads(team.tandem("eval", "again", "--json"))
    finally:
        if (team.home / "gone.whl").exists():
            (team.home / "gone.whl").rename(team.home / "data/packages" / f"{sha_of(team)}.whl")
        team.tandem("env", "yank", NAME, "--undo")


def test_a_machine_without_a_sandbox_refuses_the_run(team: Colleagues, tmp_path: Path):
    team.spec(1, "refused.toml")
    before = dict(team.env)
    team.env["PATH"] = str(tmp_path)
    try:
        told = team.tandem("train", "refused.toml", "--run-dir", "refused", code=2)
    finally:
        team.env = before
    assert "bubblewrap is not installed here" in told
    assert not (team.home / "refused").exists()


def test_a_package_is_served_beside_a_rollout_service(team: Colleagues):
    where = ("--rollouts", "http://127.0.0.1:1", "--engine", "http://127.0.0.1:1", "--model", "nowhere")
    tokens = ("--token-file", "data/token", "--engine-token-file", "data/token")
    shutil.rmtree(team.home / "cache", ignore_errors=True)
    told = team.tandem("env", "serve", NAME, *where, *tokens, code=2)
    assert "--model = 'nowhere': there is no such directory" in told  # looked at once the environment is loaded
    assert list(team.home.glob("cache/tandem/environments/*/shout_env.py"))


def test_a_package_plays_on_a_server_by_the_agents_own_token(team: Colleagues):
    team.spec(2, "remote.toml")
    spec_toml = (team.home / "remote.toml").read_text()
    newest = spec_toml.replace("==1.2.0", "")
    run = team.control.ask("POST", "/api/runs", {"spec_toml": newest, "target": "here"})["id"]
    until(lambda: team.control.state(run) in ("succeeded", "failed"), 200)
    found = team.control.ask("GET", f"/api/runs/{run}")
    assert found["state"] == "succeeded", found
    kept = json.loads((team.control.directory(run) / "environment" / PINS).read_text())
    assert kept["packages"][0]["sha256"] == sha_of(team)
    spec_there = (team.control.directory(run) / "spec.toml").read_text()
    assert f'name = "{NAME}"' in spec_there  # as it was pinned when it was submitted
    assert json.loads((team.control.mirror(run) / "environment" / PINS).read_text()) == kept
    for path in team.home.glob("jobs/tandem-*/*"):  # the trainer got files, and no token
        assert not path.is_file() or b"tda_" not in path.read_bytes(), path
    team.tandem("env", "yank", NAME)
    try:  # its weights are served whatever became of the package: a replica plays nothing
        team.tandem("deploy", run, "--name", "shouter")
        asked = {"model": "shouter", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert team.control.ask("POST", "/v1/chat/completions", asked)["model"] == "shouter@1"
    finally:
        team.tandem("env", "yank", NAME, "--undo")
    wrong = spec_toml.replace("==1.2.0", "==7.0")
    lost = team.control.ask("POST", "/api/runs", {"spec_toml": wrong, "target": "here", "retries": 0})["id"]
    until(lambda: team.control.state(lost) in ("succeeded", "failed"), 120)
    assert "there is no such version" in team.control.ask("GET", f"/api/runs/{lost}")["why"]
