"""The files of deploy/ are what systemd and Compose take, and name what this release has."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tandem.cli.main import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "tandem-control.service").read_text(encoding="utf-8")


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def parsed(words: list[str]) -> dict[str, Any]:
    """What `tandem` takes these words for; it does not run them."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    return command.make_context("tandem", [*words]).params


def exec_start() -> list[str]:
    line = re.search(r"^ExecStart=((?:.*\\\n)*.*)$", UNIT, re.MULTILINE)
    assert line
    text = line.group(1).replace("\\\n", " ").replace("${STATE_DIRECTORY}", "/var/lib/tandem")
    return shlex.split(text.replace("${CREDENTIALS_DIRECTORY}", "/run/credentials/u").replace("$TANDEM_OPTIONS", ""))


def test_the_unit_starts_the_server_with_options_that_it_has():
    program, *words = exec_start()
    assert program == "/opt/tandem/bin/tandem"
    taken = parsed(words)
    assert str(taken["data_dir"]) == "/var/lib/tandem/control"
    assert str(taken["secrets_key_file"]) == "/run/credentials/u/secrets-key"
    assert "\nKillMode=process\n" in UNIT  # else a restart would end the local jobs


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path):
    """It would also miss the program, which is not installed here."""
    for wrong, broken in ((False, UNIT), (True, UNIT.replace("KillMode=process", "KillMode=gently"))):
        unit = tmp_path / "tandem-control.service"
        unit.write_text(broken.replace("/opt/tandem/bin/tandem", "/bin/true").replace("User=tandem\n", ""))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60, check=False,
            env=os.environ | {"SYSTEMD_LOG_LEVEL": "warning"},
        )  # fmt: skip
        assert ("kill mode" in done.stderr, "tandem-control" in done.stderr) == (wrong, wrong), done.stderr


def test_the_compose_file_starts_the_server_with_options_that_it_has():
    control = compose()["services"]["control"]
    taken = parsed(control["command"])
    inside = {each.split(":")[1] for each in control["volumes"]}
    assert {str(taken["data_dir"]), str(taken["targets"]), "/home/tandem/.ssh"} == inside
    assert str(taken["secrets_key_file"]) == f"/run/secrets/{control['secrets'][0]}"
    assert control["secrets"] == [*compose()["secrets"]]
    assert f":{taken['port']}/health" in control["healthcheck"]["test"][-1]
    assert f"control:{taken['port']}" in compose()["services"]["proxy"]["command"]
    assert "ports" not in control  # only the proxy speaks to it, in clear text
    named = {each.split(":")[0] for one in compose()["services"].values() for each in one["volumes"]}
    assert {each for each in named if not each.startswith(".")} == compose()["volumes"].keys()


@pytest.mark.skipif(shutil.which("docker") is None, reason="Docker is not installed")
def test_compose_itself_takes_the_file(tmp_path: Path):
    command = ["docker", "compose", "--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    there = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60, check=False)
    if there.returncode:
        pytest.skip("Docker has no compose here")
    env = os.environ | {"TANDEM_HOST": "tandem.example.org"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 0, done.stderr
    env.pop("TANDEM_HOST")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert "the name under which users and machines reach the server" in done.stderr


def copied() -> Iterator[str]:
    for line in (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if line.startswith("COPY "):
            yield from line.split()[1:-1]


def test_the_image_is_built_from_files_that_are_there():
    assert [name for name in copied() if not (ROOT / name).exists()] == []
    extras = re.search(r'"\.\[([a-z,]+)\]"', (DEPLOY / "Dockerfile").read_text())
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras
    assert set(extras.group(1).split(",")) <= known.keys()
    for unwritten in ("secrets-key", "targets.toml", "ssh"):  # the operator's own must not reach the repository
        assert f"deploy/{unwritten}" in (ROOT / ".gitignore").read_text()
