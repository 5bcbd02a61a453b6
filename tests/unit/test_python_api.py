"""The Python API as a user's editor, type checker and first script see it."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import tandem
from tandem.errors import TandemError

FUNCTIONS = {name: value for name in tandem.__all__ if inspect.isfunction(value := getattr(tandem, name))}
SPEC = {
    "recipe": "rl",
    "model": {"preset": "tiny"},
    "environment": {"name": "sort"},
    "train": {"steps": 1, "lr": 1e-4, "groups_per_step": 1, "group_size": 2},
}


def test_an_editor_is_offered_every_name():
    assert set(tandem.__all__) <= set(dir(tandem))


def test_what_type_checkers_see_is_what_python_imports():
    tree = ast.parse(Path(tandem.__file__).read_text(encoding="utf-8"))
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tandem.")
        for alias in node.names
    }
    assert seen.keys() == {*tandem.__all__} - {"__version__"}
    for name, module in seen.items():
        assert getattr(tandem, name) is getattr(importlib.import_module(str(module)), name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_takes_a_path_takes_a_text(name: str):
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        if re.search(r"\bPath\b", str(parameter.annotation)):
            assert re.search(r"\bstr\b", str(parameter.annotation)), f"{name}({parameter})"


def of_a_used_directory(place: Any) -> None:
    tandem.run(SPEC, place)


def of_a_source(place: Any) -> None:
    tandem.sync_status(place, token_file=place)


CALLS: dict[str, Callable[[Any], Any]] = {
    "run": of_a_used_directory,
    "resume": tandem.resume,
    "digest_run": tandem.digest_run,
    "supervise_run": lambda place: tandem.supervise_run(place, place),
    "sweep": lambda place: tandem.sweep(SPEC, [0, 0], place),
    "plan_run": lambda place: tandem.plan_run(place, prices=place),
    "write_report": tandem.write_report,
    "watch_run": lambda place: tandem.watch_run(place, once=True),
    "audit_sync": tandem.audit_sync,
    "sync_status": of_a_source,
    "rollouts_status": lambda place: tandem.rollouts_status(place, token_file=place),
    "evaluate_model": lambda place: tandem.evaluate_model(place, directory=place),
    "export_run": lambda place: tandem.export_run(place, directory=place),
    "compare_runs": lambda place: tandem.compare_runs([place, place]),
    "push_artifacts": tandem.push_artifacts,
    "fetch_artifact": lambda place: tandem.fetch_artifact(place, "name", place),
    "load_environment": lambda place: tandem.load_environment(place),
    "try_environment": lambda place: tandem.try_environment(place),
    "new_environment": lambda place: tandem.new_environment(
        "shout", place / "a" if isinstance(place, Path) else place + "/a"
    ),
    "load_spec": tandem.load_spec,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_text_and_a_path_are_answered_alike(name: str, tmp_path: Path):
    """A directory that holds something else: each function refuses it, in the same words for both."""
    (tmp_path / "else.txt").write_text("something else")
    said: list[str] = []
    for place in (str(tmp_path), tmp_path):
        with pytest.raises(TandemError) as caught:
            CALLS[name](place)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_listener_takes_texts(tmp_path: Path):
    listen = tandem.Listen(str(tmp_path), ready_file=str(tmp_path / "ready"))
    assert listen == tandem.Listen(tmp_path, ready_file=tmp_path / "ready")
    assert listen.token() == listen.token_file.read_text()


def test_a_spec_is_a_dict_or_a_file_or_what_was_checked(tmp_path: Path):
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(SPEC))
    plans = [tandem.plan_run(spec) for spec in (SPEC, str(tmp_path / "mine.toml"), tandem.parse_spec(SPEC))]
    assert plans[0] == plans[1] == plans[2]


SCRIPT = """
import tandem

run = tandem.run({"recipe": "rl"}, "runs/mine")
reveal_type(run)
reveal_type(tandem.load_spec("mine.toml"))
reveal_type(tandem.plan_run("mine.toml").fits)
tandem.serve_model("runs/mine", tandem.Listen("here"))
tandem.trian
tandem.resume(5)
tandem.export_run("runs/mine", mrege=True)
"""


def test_a_type_checker_sees_real_types_and_finds_a_typing_error(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    told = json.loads(done.stdout)["generalDiagnostics"]
    found = {(each["range"]["start"]["line"], each.get("rule", "")): each["message"] for each in told}
    types = [text.split(" is ")[-1].strip('"') for (line, _), text in sorted(found.items()) if "Type of" in text]
    assert types == ["Run", "RlSpec | SftSpec | PreferenceSpec", "bool"]
    assert [(line, rule) for line, rule in sorted(found) if rule] == [
        (8, "reportAttributeAccessIssue"),
        (9, "reportArgumentType"),
        (10, "reportCallIssue"),
    ]
