"""A sandbox that cannot be is refused by a sentence, and opens what the spec names. tests/faults tries to get out."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tandem import load_spec, parse_spec, try_environment
from tandem.env.sandbox import outside
from tandem.env.sandbox.outside import Sandbox
from tandem.errors import SpecError
from tandem.rollout.workers.forkserver_client import ForkServerClient, Order
from tandem.spec.environment import EnvironmentSpec

OWN = "from tandem.env.builtin.sort import Sort as Base\nclass Own(Base): pass\n"


def spec_of(**environment: Any) -> Any:
    return parse_spec({
        "recipe": "rl",
        "model": {"preset": "tiny"},
        "environment": {"name": "sort", **environment},
        "train": {"steps": 1, "groups_per_step": 1, "group_size": 2, "lr": 1e-3},
    })  # fmt: skip


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a program in the place of bubblewrap."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(script: str) -> None:
        (folder / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bwrap").chmod(0o700)

    return put


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"sandbox": "bwrap"}, r"environment\.sandbox = 'bwrap': needs worker processes, and environment\.workers = 0"),
        ({"sandbox": "docker", "workers": 1}, "sandbox"),
        ({"sandbox_network": True, "workers": 1}, r"environment\.sandbox_network = true: has no effect without"),
        ({"sandbox_read": ["data"], "workers": 1}, r"environment\.sandbox_read = \['data'\]: has no effect without"),
        ({"sandbox_each": "worker", "workers": 1}, r"environment\.sandbox_each = 'worker': has no effect without"),
        ({"sandbox": "bwrap", "workers": 1, "sandbox_write": ["/"]}, "would open the whole machine"),
    ],
)
def test_a_spec_that_could_not_have_its_sandbox_is_refused(environment: dict[str, Any], said: str):
    with pytest.raises(SpecError, match=said):
        spec_of(**environment)


def test_a_spec_keeps_its_sandbox_with_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    spec = spec_of(sandbox="bwrap", workers=2, sandbox_read=["data"], sandbox_write=["out"]).in_place()
    assert spec.environment.sandbox_read == (str(tmp_path / "data"),)
    assert spec.environment.sandbox_write == (str(tmp_path / "out"),)
    assert spec_of(workers=2).environment.sandbox == "off"
    assert Order.of(spec_of(workers=2).environment).sandbox is None
    assert Order.of(spec.environment).sandbox == Sandbox(False, (str(tmp_path / "data"),), (str(tmp_path / "out"),))


def test_without_bubblewrap_nothing_is_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SpecError, match="bubblewrap is not installed here; install"):
        ForkServerClient(Order("sort", sandbox=Sandbox()))


def test_a_machine_without_user_namespaces_refuses_and_says_why(installed: Any):
    installed("echo 'bwrap: No permissions to creating new namespace, likely because ...' >&2; exit 1")
    with pytest.raises(SpecError, match=r"cannot make a sandbox \(No permissions to creating new namespace"):
        ForkServerClient(Order("sort", sandbox=Sandbox()))


@pytest.mark.parametrize(
    ("field", "opened"), [("read", Sandbox(read=["/not/there"])), ("write", Sandbox(write=["/x/y"]))]
)
def test_a_path_that_is_not_there_is_refused(field: str, opened: Sandbox, installed: Any):
    installed("exit 1")
    with pytest.raises(SpecError, match=rf"environment\.sandbox_{field} = '/\S+': does not exist"):
        ForkServerClient(Order("sort", sandbox=opened))


def test_a_sandbox_opens_what_is_named_and_no_more(tmp_path: Path, installed: Any):
    installed("exit 1")
    for name in ("own.py", "data.csv", "score.py"):
        (tmp_path / name).write_text(OWN)
    (tmp_path / "out").mkdir()
    closed = outside.command(Sandbox(), f"{tmp_path}/own.py:Own", {}, 2**30, ["python"])
    assert ["--ro-bind", f"{tmp_path}/own.py", f"{tmp_path}/own.py"] == near(closed, f"{tmp_path}/own.py")
    assert "--unshare-all" in closed
    assert "--share-net" not in closed
    assert str(tmp_path) not in closed
    assert "/etc/resolv.conf" not in closed
    opened = outside.command(Sandbox(True, (), (f"{tmp_path}/out",)), "sort", {}, 2**30, ["python"])
    assert near(opened, f"{tmp_path}/out")[0] == "--bind"
    assert "--share-net" in opened
    assert [word for word in closed if "bind" not in word and word.startswith(os.path.expanduser("~/."))] == [
        word for word in opened if "bind" not in word and word.startswith(os.path.expanduser("~/."))
    ]  # of the home directory only what the interpreter needs, if it lies there


def near(command: list[str], path: str) -> list[str]:
    return command[command.index(path) - 1 : command.index(path) + 2]


def test_the_files_of_prompts_of_mixes_and_of_modules_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("data.csv", "score.py", "own.py"):
        (tmp_path / name).write_text("")
    params = {"data": f"{tmp_path}/data.csv", "reward": [{"fn": f"{tmp_path}/score.py:polite", "weight": 1}, "exact"]}
    assert outside.own_files("prompts", params) == {f"{tmp_path}/data.csv", f"{tmp_path}/score.py"}
    table = {"data": {"path": f"{tmp_path}/data.csv"}, "reward": "exact"}
    assert outside.own_files("prompts", table) == {f"{tmp_path}/data.csv"}
    parts = [{"name": "prompts", "params": params}, {"name": f"{tmp_path}/own.py:Own"}, {"name": "sort"}]
    mixed = outside.own_files("mix", {"parts": parts})
    assert mixed == {f"{tmp_path}/{name}" for name in ("data.csv", "score.py", "own.py")}
    package = tmp_path / "place" / "my_task_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path / "place")
    assert outside.own_files("my_task_package.inner:Task", {}) == {str(package)}
    assert outside.own_files("gymnasium:FrozenLake-v1", {}) == set()


def test_an_environment_in_a_sandbox_is_not_tried_in_this_process(tmp_path: Path):
    (tmp_path / "own.py").write_text("raise SystemExit('it was imported')")
    text = """
        recipe = "rl"
        model.preset = "tiny"
        environment = { name = "own.py", workers = 1, sandbox = "bwrap" }
        train = { steps = 1, groups_per_step = 1, group_size = 2, lr = 1e-3 }
    """
    (tmp_path / "spec.toml").write_text(text)
    assert load_spec(tmp_path / "spec.toml").environment.sandbox == "bwrap"  # pyright: ignore
    with pytest.raises(SpecError, match="tried in this process, outside of it"):
        try_environment(tmp_path / "spec.toml")


def test_what_is_open_is_said_in_a_sentence():
    assert Sandbox().text.startswith("network: none; read: nothing more; write: nothing more; one for each episode")
    assert "network: that of this machine; read: /a, /b;" in Sandbox(True, ("/a", "/b")).text
    assert EnvironmentSpec(name="sort", workers=1, sandbox="bwrap").sandbox == "bwrap"
